"""Rows as rectangles, for models that want them so.

Shapes: B rows, T columns (`width`), R response columns (`response_width`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.layouts.slots import (
    PlacedColumn,
    SlotLine,
    place_rows,
    require_aligned,
    response_arrays,
    response_columns,
)
from turnstream.errors import RowTooLongError
from turnstream.types import Ragged, Rows

_SHORT = 512
"""Mean tokens of a row below which writing all rows through their mask is faster than slices."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeftPadded:
    """Rows that all end in the last column: `[PAD .. prompt response]`.

    Column j of a response array is column T - R + j of `input_ids_BT`. So the last R columns of a
    model's output belong to the response, whatever the lengths.

    Attributes:
        input_ids_BT: int64.
        attention_mask_BT: bool, from lengths, never from ids.
        response_mask_BR: bool, the row's response, observed tokens included.
        loss_mask_BR: bool, the trained tokens.
        logprobs_BR: float32, 0.0 left of the response; None if no row has any.
        rewards_BR: float32, token rewards.
        advantages_BR: float32, 0.0 where the loss mask is not set.
        token_weights_BR: float32, weight of each token; None where that is 1.
        extras: name to extra column.
    """

    input_ids_BT: NDArray[np.int64]
    attention_mask_BT: NDArray[np.bool_]
    response_mask_BR: NDArray[np.bool_]
    loss_mask_BR: NDArray[np.bool_]
    logprobs_BR: NDArray[np.float32] | None
    rewards_BR: NDArray[np.float32]
    advantages_BR: NDArray[np.float32]
    token_weights_BR: NDArray[np.float32] | None = None
    extras: Mapping[str, PlacedColumn] = field(default_factory=dict[str, PlacedColumn])

    @property
    def position_ids_BT(self) -> NDArray[np.int64]:
        """int64 (B, T), 0 at the first real token of every row, and on the padding before it."""
        width = self.attention_mask_BT.shape[1]
        num_padding_B = width - np.count_nonzero(self.attention_mask_BT, axis=1)
        columns_T: NDArray[np.int64] = np.arange(width, dtype=np.int64)
        return np.maximum(columns_T - num_padding_B[:, None], 0)


def left_padded(rows: Rows, *, width: int, response_width: int, pad_token_id: int) -> LeftPadded:
    """Place every row in the last columns of a rectangle."""
    require_aligned(rows)
    require_fits(rows.input_ids.lengths, width)
    require_fits(rows.loss_mask.lengths, response_width)
    tokens, responses = (len(rows), width), (len(rows), response_width)
    ids_BT, attention_BT, response_BR, *arrays = response_arrays(
        rows, responses, (tokens, np.int64), (tokens, np.bool_), (responses, np.bool_)
    )
    suffix_mask(rows.input_ids.lengths, attention_BT)
    suffix_mask(rows.loss_mask.lengths, response_BR)
    columns = response_columns(
        rows,
        arrays,
        advantage=rows.advantage[:, None],
        place=lambda values, into_BR: _right_align(values, response_BR, into_BR),
    )
    if pad_token_id:
        _fill_left(rows.input_ids.lengths, ids_BT, pad_token_id)
    _right_align(rows.input_ids, attention_BT, ids_BT)
    order: NDArray[np.int64] = np.arange(1, len(rows) + 1, dtype=np.int64)
    line = SlotLine(rows, order=order - 1, starts=order * width - rows.input_ids.lengths)
    return LeftPadded(
        input_ids_BT=ids_BT,
        attention_mask_BT=attention_BT,
        response_mask_BR=response_BR,
        **{f"{name}_BR": column for name, column in columns.items()},
        extras=line.extras(
            tokens,
            on_responses=lambda values: left_padded_column(
                values, rows, response_width=response_width
            ),
        ),
    )


def left_padded_column(values: Ragged[Any], rows: Rows, *, response_width: int) -> NDArray[Any]:
    """Return a column of response tokens, (B, R) in the dtype of the values, 0 before them."""
    shape = (len(rows), response_width, *values.values.shape[1:])
    placed_BR: NDArray[Any] = np.zeros(shape, values.values.dtype)
    response_BR: NDArray[np.bool_] = np.empty(shape[:2], np.bool_)
    suffix_mask(values.lengths, response_BR)
    _right_align(values, response_BR, placed_BR)
    return placed_BR


def suffix_mask(lengths_B: NDArray[np.int32], into_BW: NDArray[np.bool_]) -> None:
    """Set the last `lengths_B` columns of every row, and clear the others."""
    columns_W = _columns(into_BW.shape[1])
    starts_B = (into_BW.shape[1] - lengths_B).astype(columns_W.dtype)
    np.greater_equal(columns_W, starts_B[:, None], out=into_BW)


def require_fits(lengths_B: NDArray[np.integer], limit: int) -> None:
    """Refuse rows above the limit."""
    if lengths_B.max(initial=0) > limit:
        row = int(np.argmax(lengths_B > limit))
        raise RowTooLongError(row, int(lengths_B[row]), limit)


def _right_align(
    values: Ragged[Any], is_filled_BW: NDArray[np.bool_], into_BW: NDArray[Any]
) -> None:
    """Write every row into the columns that its mask says are its own."""
    num_rows, width = into_BW.shape[:2]
    bounds = values.offsets.tolist()
    if bounds[-1] - bounds[0] < num_rows * _SHORT:
        into_BW[is_filled_BW] = values.values[bounds[0] : bounds[-1]]
        return
    line = into_BW.reshape(num_rows * width, *into_BW.shape[2:])
    ends_B: NDArray[np.int64] = np.arange(1, num_rows + 1, dtype=np.int64) * width
    place_rows(values.values, bounds[:-1], bounds[1:], (ends_B - values.lengths).tolist(), line)


def _fill_left(lengths_B: NDArray[np.int32], into_BW: NDArray[Any], value: int) -> None:
    num_rows, width = into_BW.shape
    line = into_BW.reshape(num_rows * width)
    for row, length in enumerate(lengths_B.tolist()):
        line[row * width : (row + 1) * width - length] = value


def _columns(width: int) -> NDArray[np.integer]:
    """Return column numbers in the narrowest type: int16 is compared four times faster."""
    return np.arange(width, dtype=np.int16 if width <= np.iinfo(np.int16).max else np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RightPadded:
    """Rows that all begin in the first column: `[prompt response PAD ..]`.

    All columns are T wide and follow the shift rule of `turnstream.batching.layouts.slots`: column
    t scores the token in column t + 1. The last column scores nothing.

    Attributes:
        input_ids_BT: int64.
        attention_mask_BT: bool, from lengths, never from ids.
        loss_mask_BT: bool, column t scores a trained token.
        logprobs_BT: float32, 0.0 outside the response; None if no row has any.
        rewards_BT: float32, token rewards.
        advantages_BT: float32, 0.0 where the loss mask is not set.
        token_weights_BT: float32, weight of each token; None where that is 1.
        extras: name to extra column.
        row_id_B: int64.
        prompt_length_B, response_length_B: int32, in tokens.
    """

    input_ids_BT: NDArray[np.int64]
    attention_mask_BT: NDArray[np.bool_]
    loss_mask_BT: NDArray[np.bool_]
    logprobs_BT: NDArray[np.float32] | None
    rewards_BT: NDArray[np.float32]
    advantages_BT: NDArray[np.float32]
    row_id_B: NDArray[np.int64]
    prompt_length_B: NDArray[np.int32]
    response_length_B: NDArray[np.int32]
    token_weights_BT: NDArray[np.float32] | None = None
    extras: Mapping[str, PlacedColumn] = field(default_factory=dict[str, PlacedColumn])

    @property
    def position_ids_BT(self) -> NDArray[np.int64]:
        """int64 (B, T), 0 at the first token of every row; read-only."""
        columns_T: NDArray[np.int64] = np.arange(self.input_ids_BT.shape[1], dtype=np.int64)
        return np.broadcast_to(columns_T, self.input_ids_BT.shape)


def right_padded(rows: Rows, *, width: int, pad_token_id: int) -> RightPadded:
    """Place every row in the first columns of a rectangle."""
    require_aligned(rows)
    lengths_B = rows.input_ids.lengths
    require_fits(lengths_B, width)
    shape = len(rows), width
    order: NDArray[np.int64] = np.arange(len(rows), dtype=np.int64)
    line = SlotLine(rows, order=order, starts=order * width)
    columns = line.columns(shape, pad_token_id=pad_token_id, advantage=rows.advantage[:, None])
    columns_T = _columns(width)
    return RightPadded(
        extras=line.extras(shape),
        **{f"{name}_BT": column for name, column in columns.items()},
        attention_mask_BT=columns_T < lengths_B.astype(columns_T.dtype)[:, None],
        row_id_B=rows.row_id,
        prompt_length_B=rows.prompt_length,
        response_length_B=rows.response_lengths,
    )
