"""Rows on a line of slots, the common part of right-padded, packed and supervised layouts.

Row b takes the slots from `starts_B[b]` on, a token in each.

**The shift rule.** The logits of a slot score the token of the next slot. So the values of a
response token (mask, log-probability, reward, advantage) stand one slot before it::

    tokens      p p a b | q c       two rows, with the responses "a b" and "c"
    loss_mask   0 1 1 0   1 0

The last slot of a row scores nothing. No slot scores the first token of a row, so a row that
trains it is refused.

**Extra columns** in every layout:

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
0, 1 .. topk-1 stands, whose experts are distinct, as kernels require.

Shapes: N slots, B rows, T columns, R response columns, M response tokens and I items of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.merge.buffers import Shaped, zeros_in_one_piece
from turnstream.batching.rows.assemble import picked_column
from turnstream.errors import BatchingError
from turnstream.types import Extent, Ragged, Rows


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


class SlotLine:
    """Writes columns of rows into their slots, and leaves all other slots alone.

    `order` holds positions in `rows`, one per row of the line, and `starts` the first slot of each.
    """

    def __init__(self, rows: Rows, *, order: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        prompts = rows.prompt_length[order]
        self._rows = rows
        self._order = order
        self._starts = starts
        self._is_unscored = (prompts == 0) & (rows.input_ids.lengths[order] > 0)
        self._first_slots = (starts + np.maximum(prompts - 1, 0)).tolist()

    def place_tokens(self, values: Ragged[Any], into_N: NDArray[Any]) -> None:
        """Write values of tokens, each in the slot of its token."""
        begins, ends = values.offsets[self._order], values.offsets[self._order + 1]
        place_rows(values.values, begins.tolist(), ends.tolist(), self._starts.tolist(), into_N)

    def place_positions(self, into_N: NDArray[np.int64], *, lengths: NDArray[np.integer]) -> None:
        """Write 0, 1, 2 ... from the first slot of every row on, `lengths` of them."""
        counting: NDArray[np.int64] = np.arange(lengths.max(initial=0), dtype=np.int64)
        begins = [0] * len(lengths)
        place_rows(counting, begins, lengths.tolist(), self._starts.tolist(), into_N)

    def place_responses(self, values: Ragged[Any], into_N: NDArray[Any]) -> None:
        """Write values of response tokens, each in the slot that scores its token."""
        begins = values.offsets[self._order] + self._is_unscored
        ends = values.offsets[self._order + 1]
        place_rows(values.values, begins.tolist(), ends.tolist(), self._first_slots, into_N)

    def columns(
        self, shape: tuple[int, ...], *, pad_token_id: int, advantage: NDArray[np.float32]
    ) -> dict[str, Any]:
        """Return name to column that layouts share, with the slots of the line in a shape.

        `advantage` broadcasts to the shape; it is read where the rows have no `advantages`.
        """

        def place(values: Ragged[Any], into: NDArray[Any]) -> None:
            self.place_responses(values, into.reshape(-1))

        ids, *arrays = response_arrays(self._rows, shape, (shape, np.int64))
        columns = response_columns(self._rows, arrays, advantage=advantage, place=place)
        if pad_token_id:
            ids[...] = pad_token_id
        self.place_tokens(self._rows.input_ids, ids.reshape(-1))
        return {"input_ids": ids, **columns}

    def extras(
        self,
        shape: tuple[int, ...],
        *,
        on_responses: Callable[[Ragged[Any]], NDArray[Any]] | None = None,
    ) -> dict[str, PlacedColumn]:
        """Return the extra columns in order of name, with the slots of the line in a shape.

        `on_responses` places values of response tokens; None places them in the slots.
        """
        placed: dict[str, PlacedColumn] = {}
        for name, column in sorted(self._rows.extras.items()):
            values = column.values
            is_missing = num_items_B = None
            match column.per:
                case "token":
                    found = self._zeros(values, shape)
                    self.place_tokens(values, found.reshape(-1, *column.shape))
                case "first_tokens":
                    found, is_missing = self._zeros(values, shape), np.ones(shape, np.bool_)
                    found[...] = np.arange(column.shape[-1])
                    self.place_tokens(values, found.reshape(-1, *column.shape))
                    none_missing = Ragged(np.zeros(len(values.values), np.bool_), values.offsets)
                    self.place_tokens(none_missing, is_missing.reshape(-1))
                case "response_token":
                    found = on_responses(values) if on_responses else self._shifted(values, shape)
                case "row":
                    found = values.flat().values[self._order]
                case "items":
                    picked = picked_column(values, self._order)
                    found, num_items_B = picked.values, picked.lengths
            placed[name] = PlacedColumn(
                per=column.per, values=found, is_missing=is_missing, num_items_B=num_items_B
            )
        return placed

    def _shifted(self, values: Ragged[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        placed = self._zeros(values, shape)
        self.place_responses(values, placed.reshape(-1, *values.values.shape[1:]))
        return placed

    def _zeros(self, values: Ragged[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        return np.zeros((*shape, *values.values.shape[1:]), values.values.dtype)


def response_arrays(rows: Rows, shape: tuple[int, ...], *others: Shaped) -> list[NDArray[Any]]:
    """Return arrays of zeros: the others, and those that `response_columns` fills."""
    return zeros_in_one_piece(
        *others,
        (shape, np.float32),
        (shape, np.float32),
        (shape if rows.logprobs is not None else (0,), np.float32),
        (shape if rows.token_weights is not None else (0,), np.float32),
        (shape, np.bool_),
    )


def response_columns(
    rows: Rows,
    arrays: Sequence[NDArray[Any]],
    *,
    advantage: NDArray[np.float32],
    place: Callable[[Ragged[Any], NDArray[Any]], None],
) -> dict[str, Any]:
    """Return name to column of response tokens, in these arrays.

    `place` writes values of response tokens. `advantage` is read without `rows.advantages`.
    """
    rewards, advantages, logprobs, weights, mask = arrays
    place(rows.loss_mask, mask.view(np.uint8))
    if rows.rewards.values.any():
        place(rows.rewards, rewards)
    if rows.logprobs is not None:
        place(rows.logprobs, logprobs)
    if rows.token_weights is not None:
        place(rows.token_weights, weights)
    if rows.advantages is not None:
        place(rows.advantages, advantages)
        advantage = advantages
    masked_scalars(advantage, mask, advantages)
    return {
        "loss_mask": mask,
        "logprobs": None if rows.logprobs is None else logprobs,
        "rewards": rewards,
        "advantages": advantages,
        "token_weights": None if rows.token_weights is None else weights,
    }


def masked_scalars(
    scalars: NDArray[np.float32], mask: NDArray[np.bool_], into: NDArray[np.float32]
) -> None:
    """Write the scalar where the mask is set and 0.0 elsewhere; all three shapes broadcast.

    Products of bits and not of numbers: -1.0 * 0 would be -0.0, and nan * 0 would stay.
    """
    np.multiply(mask.view(np.uint8), scalars.view(np.uint32), out=into.view(np.uint32))


def place_rows(
    values: NDArray[Any],
    begins: list[int],
    ends: list[int],
    slots: list[int],
    into_N: NDArray[Any],
) -> None:
    """Copy `values[begin:end]` to the slots from `slot` on, for every row."""
    source: Any = values
    target: Any = into_N
    if values.ndim == 1 and values.dtype == into_N.dtype and values.dtype.kind in "biuf":
        # Without a change of type, slices of memory take half the time that slices of arrays do.
        source, target = values.data, into_N.data
    for begin, end, slot in zip(begins, ends, slots, strict=True):
        target[slot : slot + end - begin] = source[begin:end]


_PER_RESPONSE_TOKEN = ("loss_mask", "logprobs", "rewards", "advantages", "token_weights")
_DTYPES = {"loss_mask": np.dtype(np.uint8)}
_FLOAT32 = np.dtype(np.float32)


def require_aligned(rows: Rows) -> None:
    """Refuse rows that disagree with themselves.

    Every column has the type of `Rows` and one value per response token. Masks are 0 or 1. No row
    trains its first token.
    """
    if rows.advantage.dtype != _FLOAT32:
        raise BatchingError(f"advantage is {rows.advantage.dtype}, not float32")
    lengths_B = rows.response_lengths
    if rows.prompt_length.min(initial=0) < 0 or lengths_B.min(initial=0) < 0:
        row = int(np.flatnonzero((rows.prompt_length < 0) | (lengths_B < 0))[0])
        raise BatchingError(
            f"prompt_length of row {rows.row_id[row]}: {rows.prompt_length[row]} of "
            f"{rows.input_ids.lengths[row]} tokens"
        )
    for name in _PER_RESPONSE_TOKEN:
        column: Ragged[np.generic] | None = getattr(rows, name)
        if column is None:
            continue
        dtype = _DTYPES.get(name, _FLOAT32)
        if column.values.dtype != dtype:
            raise BatchingError(f"{name} is {column.values.dtype}, not {dtype}")
        found_B = column.lengths
        if len(found_B) != len(lengths_B):
            raise BatchingError(f"{name} has {len(found_B)} rows, the others have {len(lengths_B)}")
        if not np.array_equal(found_B, lengths_B):
            row = int(np.flatnonzero(found_B != lengths_B)[0])
            raise BatchingError(
                f"{name} of row {rows.row_id[row]}: {found_B[row]} values for "
                f"{lengths_B[row]} response tokens"
            )
    if rows.loss_mask.values.max(initial=0) > 1:
        raise BatchingError(f"loss_mask: {rows.loss_mask.values.max()} is neither 0 nor 1")
    begins_B = rows.loss_mask.offsets[:-1]
    unscored = np.flatnonzero((rows.prompt_length == 0) & (lengths_B > 0))
    trained = unscored[rows.loss_mask.values[begins_B[unscored]] != 0]
    if len(trained):
        raise BatchingError(
            f"row {rows.row_id[trained[0]]} trains its first token, which no token before it "
            "scores: its prompt is empty"
        )
