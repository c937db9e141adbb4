"""Extra columns next to the tokens of every layout.

==============  ==================  ==================  =====================  ====================
extent          left-padded         right-padded        packed, per bin        jagged
==============  ==================  ==================  =====================  ====================
token           (B, T)              (B, T)              (N,)                   (N,)
first_tokens    (B, T), is_missing  (B, T), is_missing  (N,), is_missing       (N,), is_missing
response_token  (B, R)              (B, T), shifted     (N,), shifted          (M,)
row             (B,)                (B,)                (B,)                   (B,)
items           (I,), num_items_B   (I,), num_items_B   (I,), num_items_B      (I,), num_items_B
==============  ==================  ==================  =====================  ====================

The shape of one value follows. Padding is 0. Where no router choice was captured, the dummy choice
0, 1 .. topk-1 stands. "Shifted" is the rule of `turnstream.batching.layouts.slots`: the value of a
response token stands in the slot that scores it.

Shapes: B rows, T columns, R response columns, N slots of a bin or tokens of all rows, M response
tokens of all rows, I items of all rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.layouts.packed import line_up
from turnstream.batching.layouts.padded import left_padded_column, require_fits
from turnstream.batching.layouts.slots import SlotLine
from turnstream.batching.merge.buffers import flat
from turnstream.batching.merge.merged_extras import dummy_choice
from turnstream.batching.rows.assemble import take_rows
from turnstream.types import Extent, ExtraColumn, Ragged, Rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedColumn:
    """An extra column in one layout.

    Attributes:
        per: extent of one value.
        values: shaped as the table above says, in the type of the column.
        is_missing: bool, for "first_tokens" alone: no choice was captured there.
        num_items_B: int32, for "items" alone: number of values of every row.
    """

    per: Extent
    values: NDArray[Any]
    is_missing: NDArray[np.bool_] | None = None
    num_items_B: NDArray[np.int32] | None = None


def left_padded_extras(rows: Rows, *, width: int, response_width: int) -> dict[str, PlacedColumn]:
    """Return the extra columns that go with `turnstream.batching.layouts.padded.left_padded`."""
    if not rows.extras:
        return {}
    lengths_B = rows.input_ids.lengths
    require_fits(lengths_B, width)
    ends_B: NDArray[np.int64] = np.arange(1, len(rows) + 1, dtype=np.int64) * width
    line = _Line(rows, starts_B=ends_B - lengths_B, num_slots=len(rows) * width)

    def on_responses(column: ExtraColumn) -> NDArray[Any]:
        values = _with_inert_zeros(column, rows)
        return left_padded_column(values, rows, response_width=response_width)

    return line.placed((len(rows), width), on_responses)


def right_padded_extras(rows: Rows, *, width: int) -> dict[str, PlacedColumn]:
    """Return the extra columns that go with `turnstream.batching.layouts.padded.right_padded`."""
    if not rows.extras:
        return {}
    require_fits(rows.input_ids.lengths, width)
    starts_B: NDArray[np.int64] = np.arange(len(rows), dtype=np.int64) * width
    line = _Line(rows, starts_B=starts_B, num_slots=len(rows) * width)
    shape = len(rows), width
    return line.placed(shape, lambda c: line.shifted(c).reshape(*shape, *c.shape))


def packed_extras(
    rows: Rows, *, bins: Sequence[Sequence[int]], alignment: int = 1
) -> list[dict[str, PlacedColumn]]:
    """Return for every bin the extra columns of `turnstream.batching.layouts.packed.packed`."""
    if not rows.extras:
        return [{} for _ in bins]
    order, _, starts = line_up(rows, bins=bins, alignment=alignment)
    picked = take_rows(rows, order.tolist())
    num_slots = int(starts[-1])
    line = _Line(picked, starts_B=starts[:-1], num_slots=num_slots)
    whole = line.placed((num_slots,), line.shifted)
    bounds = np.cumsum([0, *map(len, bins)]).tolist()
    return [
        {name: _cut(column, starts, first, last) for name, column in whole.items()}
        for first, last in itertools.pairwise(bounds)
    ]


def jagged_extras(rows: Rows) -> dict[str, PlacedColumn]:
    """Return the extra columns that go with `turnstream.batching.layouts.jagged.jagged`."""
    if not rows.extras:
        return {}
    offsets = rows.input_ids.offsets.astype(np.int64) - int(rows.input_ids.offsets[0])
    num_slots = int(offsets[-1])
    line = _Line(rows, starts_B=offsets[:-1], num_slots=num_slots)
    return line.placed((num_slots,), lambda column: flat(_with_inert_zeros(column, rows)).values)


class _Line:
    """Rows on a line of slots, from the slots `starts_B` on."""

    def __init__(self, rows: Rows, *, starts_B: NDArray[np.int64], num_slots: int) -> None:
        self._rows = rows
        self._starts_B = starts_B
        self._num_slots = num_slots

    def placed(
        self, shape: tuple[int, ...], on_responses: Callable[[ExtraColumn], NDArray[Any]]
    ) -> dict[str, PlacedColumn]:
        """Every column, in order of name; the slots of the line in this shape."""
        columns: dict[str, PlacedColumn] = {}
        for name in sorted(self._rows.extras):
            column = self._rows.extras[name]
            is_missing: NDArray[np.bool_] | None = None
            num_items_B: NDArray[np.int32] | None = None
            match column.per:
                case "token" | "first_tokens":
                    values_N, is_missing_N = self._on_tokens(column)
                    values = values_N.reshape(*shape, *column.shape)
                    if column.per == "first_tokens":
                        is_missing = is_missing_N.reshape(shape)
                case "response_token":
                    values = on_responses(column)
                case "row":
                    values = _on_rows(column)
                case "items":
                    values, num_items_B = flat(column.values).values, column.values.lengths
            columns[name] = PlacedColumn(
                per=column.per, values=values, is_missing=is_missing, num_items_B=num_items_B
            )
        return columns

    def shifted(self, column: ExtraColumn) -> NDArray[Any]:
        """Values of response tokens, each in the slot that scores its token."""
        rows = self._rows
        placed_N = np.zeros((self._num_slots, *column.shape), column.dtype)
        order: NDArray[np.int64] = np.arange(len(rows), dtype=np.int64)
        line = SlotLine(rows, order=order, starts=self._starts_B)
        line.place_responses(_with_inert_zeros(column, rows), placed_N)
        return placed_N

    def _on_tokens(self, column: ExtraColumn) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Values from the first slot of every row on, and which slots have none."""
        values_N = np.zeros((self._num_slots, *column.shape), column.dtype)
        if column.per == "first_tokens":
            values_N[...] = dummy_choice(column.shape, column.dtype)
        is_missing_N = np.ones(self._num_slots, np.bool_)
        for start, of_row in zip(self._starts_B.tolist(), column.values, strict=True):
            values_N[start : start + len(of_row)] = of_row
            is_missing_N[start : start + len(of_row)] = False
        return values_N, is_missing_N


def _on_rows(column: ExtraColumn) -> NDArray[Any]:
    """One value per row; zeros for inert rows, which may have none."""
    values_B = np.zeros((len(column.values), *column.shape), column.dtype)
    values_B[column.values.lengths > 0] = flat(column.values).values
    return values_B


def _with_inert_zeros(column: ExtraColumn, rows: Rows) -> Ragged[Any]:
    """Return the column with zeros for inert rows that have no value."""
    values, lengths_B = column.values, rows.loss_mask.lengths
    is_empty_B = rows.is_padding & (values.lengths == 0) & (lengths_B > 0)
    if not is_empty_B.any():
        return values
    pieces = [
        np.zeros((length, *column.shape), column.dtype) if is_empty else of_row
        for of_row, length, is_empty in zip(
            values, lengths_B.tolist(), is_empty_B.tolist(), strict=True
        )
    ]
    return Ragged(np.concatenate(pieces), rows.loss_mask.offsets - rows.loss_mask.offsets[0])


def _cut(column: PlacedColumn, starts: NDArray[np.int64], first: int, last: int) -> PlacedColumn:
    """The part of the rows [first, last), whose slots begin at `starts`: views."""
    num_items_B = column.num_items_B
    if num_items_B is not None:
        own = slice(int(num_items_B[:first].sum()), int(num_items_B[:last].sum()))
    elif column.per == "row":
        own = slice(first, last)
    else:
        own = slice(int(starts[first]), int(starts[last]))
    return PlacedColumn(
        per=column.per,
        values=column.values[own],
        is_missing=None if column.is_missing is None else column.is_missing[own],
        num_items_B=None if num_items_B is None else num_items_B[first:last],
    )
