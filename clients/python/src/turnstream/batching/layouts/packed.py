"""Rows in sequence, without padding, for attention that keeps sequences apart.

Shapes: N slots of a bin, B rows of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.layouts.slots import (
    PlacedColumn,
    SlotLine,
    require_aligned,
)
from turnstream.errors import BatchingError
from turnstream.types import Rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """Rows of one bin, concatenated.

    Row b is the slots `cu_seqlens[b]:cu_seqlens[b + 1]`: its tokens, then up to alignment - 1 slots
    of padding, which no token sees under causal attention. All columns follow the shift rule of
    `turnstream.batching.layouts.slots`.

    Attributes:
        input_ids_N: int64.
        position_ids_N: int64, 0 at the first token of every row.
        cu_seqlens: int32 (B + 1,), first slot of every row, and N at the end.
        length_B: int32, tokens of every row, its padding left out.
        loss_mask_N: bool, slot j scores a trained token.
        logprobs_N: float32, 0.0 outside the response; None if no row of the mini-batch has any.
        rewards_N: float32, token rewards.
        advantages_N: float32, 0.0 where the loss mask is not set.
        token_weights_N: float32, weight of each token; None where that is 1.
        extras: name to extra column.
        row_id_B: int64.
        prompt_length_B, response_length_B: int32, in tokens.
    """

    input_ids_N: NDArray[np.int64]
    position_ids_N: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    length_B: NDArray[np.int32]
    loss_mask_N: NDArray[np.bool_]
    logprobs_N: NDArray[np.float32] | None
    rewards_N: NDArray[np.float32]
    advantages_N: NDArray[np.float32]
    row_id_B: NDArray[np.int64]
    prompt_length_B: NDArray[np.int32]
    response_length_B: NDArray[np.int32]
    token_weights_N: NDArray[np.float32] | None = None
    extras: Mapping[str, PlacedColumn] = field(default_factory=dict[str, PlacedColumn])

    @property
    def max_length(self) -> int:
        """Return the slots of the longest row with its padding, for attention kernels."""
        return int(np.diff(self.cu_seqlens).max(initial=0))


def packed(
    rows: Rows, *, bins: Sequence[Sequence[int]], pad_token_id: int, alignment: int = 1
) -> list[Packed]:
    """Return one value per bin, its rows in order. All share one piece of memory."""
    require_aligned(rows)
    order, lengths, starts = line_up(rows, bins=bins, alignment=alignment)
    shape = (int(starts[-1]),)
    line = SlotLine(rows, order=order, starts=starts[:-1])
    token_lengths = rows.input_ids.lengths[order]
    placed = line.columns(
        shape,
        pad_token_id=pad_token_id if np.any(token_lengths < lengths) else 0,
        advantage=np.repeat(rows.advantage[order], lengths),
    )
    positions_N: NDArray[np.int64] = np.zeros(shape, np.int64)
    line.place_positions(positions_N, lengths=lengths)
    columns = {
        **{f"{name}_N": column for name, column in placed.items()},
        "position_ids_N": positions_N,
        "length_B": token_lengths,
        "row_id_B": rows.row_id[order],
        "prompt_length_B": rows.prompt_length[order],
        "response_length_B": rows.response_lengths[order],
    }
    extras = line.extras(shape)
    bounds = np.cumsum([0, *map(len, bins)]).tolist()
    return [_cut(columns, extras, starts[a : b + 1], a) for a, b in itertools.pairwise(bounds)]


def _cut(
    columns: Mapping[str, NDArray[Any] | None],
    extras: Mapping[str, PlacedColumn],
    starts: NDArray[np.int64],
    first_row: int,
) -> Packed:
    """Return the bin of the rows that begin at these slots: views of the columns."""
    slots = slice(int(starts[0]), int(starts[-1]))
    rows = slice(first_row, first_row + len(starts) - 1)
    own: dict[str, Any] = {
        name: None if column is None else column[slots if name.endswith("_N") else rows]
        for name, column in columns.items()
    }
    return Packed(
        cu_seqlens=(starts - starts[0]).astype(np.int32),
        extras={name: _cut_extra(column, slots, rows) for name, column in extras.items()},
        **own,
    )


def _cut_extra(column: PlacedColumn, slots: slice, rows: slice) -> PlacedColumn:
    counts = column.num_items_B
    if counts is not None:
        items = slice(int(counts[: rows.start].sum()), int(counts[: rows.stop].sum()))
        return replace(column, values=column.values[items], num_items_B=counts[rows])
    if column.per == "row":
        return replace(column, values=column.values[rows])
    is_missing = None if column.is_missing is None else column.is_missing[slots]
    return replace(column, values=column.values[slots], is_missing=is_missing)


def line_up(
    rows: Rows, *, bins: Sequence[Sequence[int]], alignment: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return rows in the order of bins: positions, slots of each, and first slots (one more)."""
    if alignment < 1:
        raise BatchingError(f"alignment={alignment} must be at least 1")
    order = np.array([row for rows_of_bin in bins for row in rows_of_bin], np.int64)
    lengths = -(-rows.input_ids.lengths[order].astype(np.int64) // alignment) * alignment
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    longest = np.diff(starts[np.cumsum([0, *map(len, bins)])]).max(initial=0)
    if longest > np.iinfo(np.int32).max:
        raise BatchingError(f"{longest} slots in one bin: cu_seqlens are int32")
    return order, lengths, starts
