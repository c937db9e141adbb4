"""Supervised rows: given token sequences and a weight for every token as a target.

They are `Rows` like any others, with an advantage of 1, so that `-advantage * log-probability` is
their cross-entropy, in every layout and by every loss. Beside them stand the weights, where a mask
of 0 and 1 does not say everything. The first token of a sequence is never a target: nothing scores
it. So it always counts as prompt, and its weight is not read.

Shapes: B rows; W slots of a bin.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.buffers import zeros_in_one_piece
from turnstream.batching.jagged import flat
from turnstream.batching.packed import line_up
from turnstream.batching.packing import Bins, Method, OverLong, grow_bins, pack
from turnstream.batching.slots import SlotLine
from turnstream.errors import BatchingError
from turnstream.types import Ragged, Rows, Status

LossScale = Literal["all_targets", "own_targets", "none"]
"""What the weights of a row are divided by: the sum over all rows, its own sum, or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SupervisedRows:
    """Token sequences to learn from.

    Attributes:
        rows: the prompt of each ends before its first target; later tokens that are no targets are
            masked. Advantage, weight and reward are 1, 1 and missing.
        target_weights: float32, one per response token, 0.0 where masked.
    """

    rows: Rows
    target_weights: Ragged[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SupervisedBins:
    """Packed sequences as a rectangle, one bin in each of its K rows, in shard-major order.

    Row k belongs to rank `k // (K / dp_world_size)`. Columns follow the shift rule of
    `turnstream.batching.slots`.

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
) -> SupervisedRows:
    """Rows of these sequences.

    Args:
        input_ids: at least one token each.
        token_weights: one per token: what its cross-entropy is multiplied by, 0 where it is not
            learned; fractions are kept.
        first_row_id: row ids count up from here.

    Raises:
        BatchingError: a sequence is empty, has another number of weights than tokens, or a weight
            that is not finite.
    """
    input_ids, token_weights = flat(input_ids), flat(token_weights)
    _check(input_ids, token_weights)
    begins, ends = input_ids.offsets[:-1].astype(np.int64), input_ids.offsets[1:].astype(np.int64)
    first_B = _first_targets(token_weights, begins=begins, ends=ends)
    offsets = np.concatenate([[0], np.cumsum(ends - first_B)]).astype(np.int32)
    weights = Ragged(token_weights.values[_ranges(first_B, ends)].astype(np.float32), offsets)
    rows = _rows(
        input_ids,
        Ragged((weights.values != 0).astype(np.uint8), offsets),
        prompt_lengths=(first_B - begins).astype(np.int32),
        first_row_id=first_row_id,
    )
    return SupervisedRows(rows=rows, target_weights=weights)


def loss_scales(batch: SupervisedRows, *, loss_scale: LossScale) -> NDArray[np.float64]:
    """float64 (B,): what the weights of every row are multiplied by.

    A sum below 1 counts as 1, so that a row of little weight is not blown up, and one of none does
    not divide by 0. Fractions are summed as they are.
    """
    sums = np.concatenate([[0.0], np.cumsum(batch.target_weights.values, dtype=np.float64)])
    own_B = np.diff(sums[batch.target_weights.offsets])
    if loss_scale == "none":
        return np.ones(len(own_B))
    divisor_B = own_B if loss_scale == "own_targets" else np.full(len(own_B), sums[-1])
    return 1.0 / np.maximum(divisor_B, 1.0)


def scaled_weights(batch: SupervisedRows, *, loss_scale: LossScale) -> Ragged[np.float32]:
    """The target weights, scaled: the loss is the sum of these times -log-probability."""
    scales_B = loss_scales(batch, loss_scale=loss_scale)
    weights = batch.target_weights
    scaled = weights.values * np.repeat(scales_B, weights.lengths)
    return Ragged(scaled.astype(np.float32), weights.offsets)


def bin_sequences(
    lengths: Sequence[int],
    *,
    capacity: int,
    dp_world_size: int,
    alignment: int = 1,
    method: Method = "best_fit_decreasing",
    over_long: OverLong = "refuse",
) -> Bins:
    """As many bins for every rank, in shard-major order: all bins of rank 0, then of rank 1.

    Rows are packed for the capacity, bins are split until they divide, and bin k goes to rank
    `k % dp_world_size`.

    Args:
        lengths: tokens of every row, each at least 1.
        capacity: slots of a bin, the padding between aligned rows included.
        dp_world_size: number of ranks.
        alignment: see `turnstream.batching.packed.sequence_alignment`.
        method: of packing.
        over_long: what to do with a row above the capacity.

    Raises:
        RowTooLongError: a row is longer than the capacity and `over_long` is "refuse".
        BatchingError: a row is empty, or there are fewer rows than ranks.
    """
    bins = pack(lengths, capacity=capacity, method=method, over_long=over_long, alignment=alignment)
    bins = grow_bins(bins, lengths, multiple_of=dp_world_size)
    return [
        bins[k]
        for dp_rank in range(dp_world_size)
        for k in range(dp_rank, len(bins), dp_world_size)
    ]


def packed_supervised(
    batch: SupervisedRows,
    *,
    bins: Sequence[Sequence[int]],
    pad_token_id: int,
    alignment: int = 1,
    loss_scale: LossScale = "all_targets",
) -> SupervisedBins:
    """Lay the bins out, each in a row of a rectangle as wide as the fullest.

    Args:
        batch: sequences and weights.
        bins: positions of sequences, from `bin_sequences`.
        pad_token_id: behind sequences; never read by the loss.
        alignment: every sequence begins at a multiple of this, in tokens.
        loss_scale: what the weights are divided by.

    Raises:
        BatchingError: alignment is below 1.
    """
    rows = batch.rows
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
    line.place_ids(ids_KW.reshape(num_slots))
    line.place_positions(positions_KW.reshape(num_slots), lengths=lengths)
    line.mark_tokens(attention_KW.reshape(num_slots))
    scaled = scaled_weights(batch, loss_scale=loss_scale)
    line.place_responses(scaled, weights_KW.reshape(num_slots))
    token_lengths = rows.input_ids.lengths
    return SupervisedBins(
        input_ids_KW=ids_KW,
        attention_mask_KW=attention_KW,
        position_ids_KW=positions_KW,
        target_weights_KW=weights_KW,
        bins=tuple(tuple(rows_of_bin) for rows_of_bin in bins),
        sequence_lengths=tuple(tuple(token_lengths[list(own)].tolist()) for own in bins),
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
    is_finite: NDArray[np.bool_] = np.isfinite(token_weights.values)
    places = np.flatnonzero(~is_finite)
    if len(places):
        row = bisect.bisect_right(token_weights.offsets.tolist(), int(places[0])) - 1
        raise BatchingError(f"token_weights of sequence {row}: a weight is not finite")


def _first_targets(
    weights: Ragged[Any], *, begins: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Where the first token of every row that is learned stands, from its second on; or its end."""
    targets = np.flatnonzero(weights.values)
    at_B = np.searchsorted(targets, begins + 1)
    return np.minimum(np.append(targets, weights.offsets[-1])[at_B], ends)


def _ranges(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """All positions of these ranges, in order."""
    lengths = ends - begins
    starts = np.cumsum(lengths) - lengths
    return np.repeat(begins - starts, lengths) + np.arange(int(lengths.sum()), dtype=np.int64)


def _rows(
    input_ids: Ragged[np.int32],
    mask: Ragged[np.uint8],
    *,
    prompt_lengths: NDArray[np.int32],
    first_row_id: int,
) -> Rows:
    num_rows = len(input_ids)
    row_ids: NDArray[np.int64] = np.arange(first_row_id, first_row_id + num_rows, dtype=np.int64)
    names = [str(row_id) for row_id in row_ids.tolist()]
    sums = np.concatenate([[0], np.cumsum(mask.values, dtype=np.int64)])
    num_targets = np.diff(sums[mask.offsets])
    zeros: NDArray[np.int32] = np.zeros(num_rows, np.int32)
    runs: NDArray[np.int32] = np.zeros(num_rows + 1, np.int32)
    return Rows(
        row_id=row_ids,
        trajectory_id=[f"{name}/0/0" for name in names],
        group_id=names,
        prompt_uid=[""] * num_rows,
        status=[str(Status.COMPLETED)] * num_rows,
        sample=zeros,
        attempt=zeros,
        sequence_index=zeros,
        is_last=np.ones(num_rows, np.bool_),
        is_padding=np.zeros(num_rows, np.bool_),
        weight=np.ones(num_rows, np.float32),
        reward=np.full(num_rows, np.nan, np.float32),
        advantage=np.ones(num_rows, np.float32),
        prompt_length=prompt_lengths,
        trajectory_num_tokens=num_targets,
        group_num_tokens=num_targets,
        input_ids=input_ids,
        loss_mask=mask,
        logprobs=None,
        rewards=Ragged(np.zeros(len(mask.values), np.float32), mask.offsets),
        run_versions=Ragged(np.empty(0, np.int64), runs),
        run_counts=Ragged(np.empty(0, np.int32), runs),
    )
