"""Supervised rows: given token sequences and a weight for every token as a target.

They are `Rows` with an advantage of 1, so that `-advantage * log-probability` is their
cross-entropy. Fractions are `token_weights`, which the aggregation multiplies in. No token scores
the first of a sequence, so it always counts as prompt, and its weight is not read.

Shapes: B rows; K bins, W slots of a bin.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.layouts.packed import line_up
from turnstream.batching.layouts.slots import SlotLine, require_aligned
from turnstream.batching.merge.buffers import offsets_of, row_sums, zeros_in_one_piece
from turnstream.batching.packing.bins import Bins, Method, OverLong, grow_bins, pack
from turnstream.batching.rows.plain_rows import plain_rows
from turnstream.errors import BatchingError
from turnstream.types import Ragged, Rows, Status

LossScale = Literal["all_targets", "own_targets", "none"]
"""Divisor of the weights of a row: the sum over all rows, its own sum, or none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SupervisedBins:
    """Packed sequences as a rectangle, one bin in each of its K rows, in shard-major order.

    Row k belongs to rank `k // (K / dp_world_size)`. Columns follow the shift rule of
    `turnstream.batching.layouts.slots`.

    Attributes:
        input_ids_KW: int64.
        attention_mask_KW: bool, set on real tokens alone.
        position_ids_KW: int64, 0 at the first token of every sequence.
        target_weights_KW: float32, scaled; slot j scores the token in slot j + 1.
        bins: positions of the sequences of every row, in order.
        sequence_lengths: their tokens, padding left out.
        cu_seqlens: int32 for each row, where its sequences begin and the last one ends.
    """

    input_ids_KW: NDArray[np.int64]
    attention_mask_KW: NDArray[np.bool_]
    position_ids_KW: NDArray[np.int64]
    target_weights_KW: NDArray[np.float32]
    bins: tuple[tuple[int, ...], ...]
    sequence_lengths: tuple[tuple[int, ...], ...]
    cu_seqlens: tuple[NDArray[np.int32], ...]


def supervised_rows(
    input_ids: Ragged[np.int32], token_weights: Ragged[Any], *, first_row_id: int = 0
) -> Rows:
    """Return rows of these sequences. The prompt of each ends before its first target.

    A token weight multiplies the token's cross-entropy; a token of weight 0 is not learned.
    """
    input_ids, token_weights = input_ids.flat(), token_weights.flat()
    _check(input_ids, token_weights)
    starts_B, ends_B = input_ids.offsets[:-1], input_ids.offsets[1:]
    is_target_N = token_weights.values != 0
    is_target_N[starts_B] = False  # nothing predicts the first token
    targets = np.flatnonzero(is_target_N)
    first_B = np.append(targets, len(is_target_N))[np.searchsorted(targets, starts_B)]
    begins_B = np.minimum(first_B, ends_B)  # without a target, a row is all prompt
    spans = zip(begins_B.tolist(), ends_B.tolist(), strict=True)
    responses = [token_weights.values[begin:end] for begin, end in spans]
    values = np.concatenate([np.empty(0, np.float32), *responses], dtype=np.float32)
    weights = Ragged(values, offsets_of(ends_B - begins_B))
    mask = Ragged((weights.values != 0).view(np.uint8), weights.offsets)
    rows = plain_rows(
        input_ids, mask, num_trained_B=row_sums(mask, np.int64), first_row_id=first_row_id
    )
    names = [str(row_id) for row_id in rows.row_id.tolist()]
    return replace(
        rows,
        trajectory_id=[f"{name}/0/0" for name in names],
        group_id=names,
        status=[str(Status.COMPLETED)] * len(rows),
        advantage=np.ones(len(rows), np.float32),
        token_weights=weights,
    )


def scaled_weights(rows: Rows, *, loss_scale: LossScale) -> Ragged[np.float32]:
    """Return weights of the response tokens: the loss is the sum of them * -log-probability.

    Without token weights, the weight of a token is its mask. A sum below 1 counts as 1, so that a
    row of little weight does not grow.
    """
    mask = rows.loss_mask.flat()
    values = mask.values.astype(np.float32)
    if rows.token_weights is not None:
        values = rows.token_weights.flat().values * mask.values
    weights = Ragged(values, mask.offsets)
    if loss_scale == "none":
        return weights
    if loss_scale == "own_targets":
        sums_B = np.maximum(row_sums(weights, np.float64), 1.0)
        return Ragged(
            values * np.repeat((1.0 / sums_B).astype(np.float32), mask.lengths), mask.offsets
        )
    scale = np.float32(1.0 / max(values.sum(dtype=np.float64), 1.0))
    return Ragged(values * scale, mask.offsets)


def bin_sequences(
    lengths: Sequence[int],
    *,
    capacity: int,
    dp_world_size: int,
    alignment: int = 1,
    method: Method = "best_fit_decreasing",
    over_long: OverLong = "refuse",
) -> Bins:
    """Return as many bins for every rank, in shard-major order: all of rank 0, then of rank 1.

    Bins are split until their number divides; bin k belongs to rank `k % dp_world_size`.
    """
    bins = pack(lengths, capacity=capacity, method=method, over_long=over_long, alignment=alignment)
    bins = grow_bins(bins, lengths, multiple_of=dp_world_size)
    return [
        bins[k]
        for dp_rank in range(dp_world_size)
        for k in range(dp_rank, len(bins), dp_world_size)
    ]


def packed_supervised(
    rows: Rows,
    *,
    bins: Sequence[Sequence[int]],
    pad_token_id: int,
    alignment: int = 1,
    loss_scale: LossScale = "all_targets",
) -> SupervisedBins:
    """Lay the bins out, each in a row of a rectangle as wide as the fullest.

    Without token weights, the weight of a token is its mask.
    """
    require_aligned(rows)
    order, lengths, line_starts = line_up(rows, bins=bins, alignment=alignment)
    bounds = np.cumsum([0, *map(len, bins)])
    bin_starts = line_starts[bounds]
    width = int(np.diff(bin_starts).max(initial=0))
    moved = np.arange(len(bins), dtype=np.int64) * width - bin_starts[:-1]
    starts = line_starts[:-1] + np.repeat(moved, np.diff(bounds))
    shape, num_slots = (len(bins), width), len(bins) * width
    ids_KW, positions_KW, weights_KW, attention_KW = zeros_in_one_piece(
        (shape, np.int64), (shape, np.int64), (shape, np.float32), (shape, np.bool_)
    )
    if pad_token_id:
        ids_KW[...] = pad_token_id
    line = SlotLine(rows, order=order, starts=starts)
    line.place_tokens(rows.input_ids, ids_KW.reshape(num_slots))
    line.place_positions(positions_KW.reshape(num_slots), lengths=lengths)
    is_token = Ragged(np.ones(len(rows.input_ids.values), np.bool_), rows.input_ids.offsets)
    line.place_tokens(is_token, attention_KW.reshape(num_slots))
    scaled = scaled_weights(rows, loss_scale=loss_scale)
    line.place_responses(scaled, weights_KW.reshape(num_slots))
    token_lengths = rows.input_ids.lengths.tolist()
    return SupervisedBins(
        input_ids_KW=ids_KW,
        attention_mask_KW=attention_KW,
        position_ids_KW=positions_KW,
        target_weights_KW=weights_KW,
        bins=tuple(tuple(rows_of_bin) for rows_of_bin in bins),
        sequence_lengths=tuple(tuple([token_lengths[row] for row in own]) for own in bins),
        cu_seqlens=tuple(
            (line_starts[first : last + 1] - line_starts[first]).astype(np.int32)
            for first, last in itertools.pairwise(bounds.tolist())
        ),
    )


def _check(input_ids: Ragged[np.int32], token_weights: Ragged[Any]) -> None:
    lengths_B, found_B = input_ids.lengths, token_weights.lengths
    if len(found_B) != len(lengths_B):
        raise BatchingError(f"{len(found_B)} rows of weights for {len(lengths_B)} sequences")
    if lengths_B.min(initial=1) < 1:
        raise BatchingError(f"sequence {int(np.argmin(lengths_B))} has no token")
    if not np.array_equal(found_B, lengths_B):
        row = int(np.flatnonzero(found_B != lengths_B)[0])
        raise BatchingError(
            f"token_weights of sequence {row}: {found_B[row]} values for {lengths_B[row]} tokens"
        )
    is_finite = np.abs(token_weights.values) <= np.finfo(np.float32).max
    places = np.flatnonzero(~is_finite)
    if len(places):
        row = bisect.bisect_right(token_weights.offsets.tolist(), int(places[0])) - 1
        raise BatchingError(f"token_weights of sequence {row}: a weight is no finite float32")
