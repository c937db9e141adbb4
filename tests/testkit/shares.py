"""The share of one rank and its passes, and slow references of the denominators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from turnstream.batching.config.values import RowWeights
from turnstream.batching.packing.microbatch import Budget
from turnstream.batching.rows.assemble import concatenate_rows, take_rows
from turnstream.batching.rows.minibatch import cut_ranks, rank_passes, take_share
from turnstream.batching.scoring.denominators import ShareCounts, num_trained
from turnstream.batching.scoring.filters import row_weights
from turnstream.types import Denominators, Rows


def rank_share(
    rows: Rows,
    *,
    step: int,
    mini_batch: int,
    dp_rank: int,
    dp_world_size: int,
    pad_token_id: int,
    multiple_of: int = 1,
    budget: Budget | None = None,
) -> Rows:
    """Return the rows of one rank; inert ones come last."""
    ranks = cut_ranks(
        rows.input_ids.lengths,
        dp_world_size=dp_world_size,
        multiple_of=multiple_of,
        budget=budget or Budget(limit=0),
    )
    return take_share(
        rows, ranks[dp_rank], step=step, mini_batch=mini_batch, pad_token_id=pad_token_id
    )


def budgeted_passes(
    rows: Rows,
    *,
    dp_rank: int,
    dp_world_size: int,
    budget: Budget,
    passes_multiple_of: int = 1,
    multiple_of: int = 1,
) -> tuple[tuple[int, ...], ...]:
    """Return the forward passes of one rank, as positions in its share."""
    lengths = rows.input_ids.lengths
    ranks = cut_ranks(lengths, dp_world_size=dp_world_size, multiple_of=multiple_of, budget=budget)
    passes = rank_passes(lengths, ranks, budget=budget, multiple_of=passes_multiple_of)
    return tuple(tuple(rows_of_pass) for rows_of_pass in passes[dp_rank])


def join_shares(shares: Sequence[Rows]) -> Rows:
    """Return the whole mini-batch of these shares, by row id and without inert rows."""
    together = concatenate_rows(shares)
    real = np.flatnonzero(~together.is_padding)
    order = real[np.argsort(together.row_id[real], kind="stable")]
    return take_rows(together, order.tolist())


def count_denominators(shares: Sequence[Rows], *, length_constant: int) -> Denominators:
    """Return the denominators of a mini-batch, counted from the masks of the ranks' rows."""
    counts = [ShareCounts.of(rows, num_trained(rows)) for rows in shares]
    return Denominators(
        num_tokens=sum(share.num_tokens for share in counts),
        num_sequences=sum(share.num_sequences for share in counts),
        num_trajectories=round(math.fsum(share.num_trajectories for share in counts)),
        num_groups=round(math.fsum(share.num_groups for share in counts)),
        weight_sum=math.fsum(share.weight_sum for share in counts),
        length_constant=length_constant,
    )


def weighted(rows: Rows, kind: RowWeights) -> Rows:
    """Return the rows as a run with this setting weighs them; inert ones weigh nothing."""
    trained = [int(own.sum()) for own in rows.loss_mask]
    weights = np.zeros(len(rows), np.float32)
    for name in {*rows.trajectory_id} - {""}:
        own = [row for row, other in enumerate(rows.trajectory_id) if other == name]
        weights[own] = row_weights(kind, [trained[row] for row in own])
    return replace(rows, weight=np.where(np.array(trained) > 0, weights, 0).astype(np.float32))
