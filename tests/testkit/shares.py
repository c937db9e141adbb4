"""The share of one rank, and its passes: the cut of the product, made for a single rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnstream.batching.packing.microbatch import Budget
from turnstream.batching.rows.assemble import concatenate_rows, take_rows
from turnstream.batching.rows.minibatch import cut_ranks, rank_passes, take_share
from turnstream.types import Rows


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
