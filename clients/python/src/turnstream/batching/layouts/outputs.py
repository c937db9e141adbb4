"""Model outputs for laid-out rows, returned as one array per row, by row id.

Each array has the values of a row's response tokens. Passes and ranks finish in any order, so rows
are found by their id::

    parts = [response_values_packed(logprobs_N, bin) for bin, logprobs_N in ...]
    column = join_by_row_id(parts, rows)

Where the columns of a layout are shifted, so are the values: slot j has the value of the token in
slot j + 1. The first response token of a row with an empty prompt has no slot: its value is NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.layouts.jagged import Jagged
from turnstream.batching.layouts.packed import Packed
from turnstream.batching.layouts.padded import require_fits
from turnstream.batching.merge.buffers import offsets_of
from turnstream.errors import BatchingError
from turnstream.types import Ragged, Rows

ResponseValues = dict[int, NDArray[Any]]
"""Row id to the values of its response tokens; real rows only. Views where possible."""

_Numbers = Sequence[int] | NDArray[np.integer]


def response_values_left_padded(
    values_BR: NDArray[Any], *, row_ids: Sequence[int], response_lengths: Sequence[int]
) -> ResponseValues:
    """Return the last values of every row."""
    line, starts_B = _line(values_BR, row_ids)
    lengths_B, width = np.array(response_lengths, np.int64), values_BR.shape[1]
    require_fits(lengths_B, width)
    return _cut(line, row_ids, starts_B + width - lengths_B, lengths_B)


def response_values_right_padded(
    values_BT: NDArray[Any],
    *,
    row_ids: Sequence[int],
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> ResponseValues:
    """Return the values of every row from the column before its response on."""
    line, starts_B = _line(values_BT, row_ids)
    prompts_B, lengths_B = np.array(prompt_lengths, np.int64), np.array(response_lengths, np.int64)
    require_fits(prompts_B + lengths_B, values_BT.shape[1])
    return _cut_shifted(line, row_ids, starts_B, prompts_B, lengths_B)


def response_values_packed(values_N: NDArray[Any], bin_of_rows: Packed) -> ResponseValues:
    """Return the values of every row of a bin from the slot before its response on."""
    num_slots = len(bin_of_rows.input_ids_N)
    if len(values_N) != num_slots:
        raise BatchingError(f"{len(values_N)} values for {num_slots} slots")
    return _cut_shifted(
        values_N,
        bin_of_rows.row_id_B,
        bin_of_rows.cu_seqlens[:-1],
        bin_of_rows.prompt_length_B,
        bin_of_rows.response_length_B,
    )


def response_values_jagged(values_M: NDArray[Any], rows: Jagged) -> ResponseValues:
    """Return the values of every row by its response offsets."""
    offsets = rows.response_offsets
    if len(values_M) != offsets[-1]:
        raise BatchingError(f"{len(values_M)} values for {offsets[-1]} response tokens")
    return _cut(values_M, rows.row_id_B, offsets[:-1], np.diff(offsets))


def join_by_row_id(parts: Iterable[Mapping[int, NDArray[Any]]], rows: Rows) -> Ragged[Any]:
    """Return a column for `rows`, from the parts of passes and ranks in any order.

    Inert rows have zeros.
    """
    found: ResponseValues = {}
    for part in parts:
        for row_id, values in part.items():
            _add(found, row_id, values)
    any_values = next(iter(found.values()), np.empty(0, np.float32))
    dtype, shape = any_values.dtype, any_values.shape[1:]
    column: list[NDArray[Any]] = [np.empty((0, *shape), dtype)]
    lengths = rows.response_lengths.tolist()
    for row_id, is_inert, length in zip(
        rows.row_id.tolist(), rows.is_padding.tolist(), lengths, strict=True
    ):
        values = np.zeros((length, *shape), dtype) if is_inert else found.pop(row_id, None)
        if values is None:
            raise BatchingError(f"no values came for row {row_id}")
        if len(values) != length:
            raise BatchingError(f"{len(values)} values for the {length} of row {row_id}")
        column.append(values)
    if found:
        raise BatchingError(f"values came for rows that are not here: {sorted(found)[:8]}")
    return Ragged(np.concatenate(column), offsets_of(lengths))


def _cut_shifted(
    line: NDArray[Any],
    row_ids: _Numbers,
    starts_B: NDArray[np.integer],
    prompts_B: NDArray[np.integer],
    lengths_B: NDArray[np.integer],
) -> ResponseValues:
    cut = _cut(line, row_ids, starts_B + prompts_B - 1, lengths_B)
    for row in np.flatnonzero((prompts_B == 0) & (lengths_B > 0)).tolist():
        row_id, start = int(row_ids[row]), int(starts_B[row])
        if row_id < 0:
            continue
        if line.dtype.kind != "f":
            raise BatchingError(
                f"row {row_id} has no prompt: its first value is unknown, and {line.dtype} has "
                "no NaN to say so"
            )
        unknown = np.full((1, *line.shape[1:]), np.nan, line.dtype)
        cut[row_id] = np.concatenate([unknown, line[start : start + int(lengths_B[row]) - 1]])
    return cut


def _cut(
    line: NDArray[Any],
    row_ids: _Numbers,
    starts_B: NDArray[np.integer],
    lengths_B: NDArray[np.integer],
) -> ResponseValues:
    cut: ResponseValues = {}
    for row_id, start, length in zip(row_ids, starts_B.tolist(), lengths_B.tolist(), strict=True):
        if row_id >= 0:  # int: a dictionary of numpy numbers would print, and pickle, as such
            _add(cut, int(row_id), line[start : start + length])
    return cut


def _add(to: ResponseValues, row_id: int, values: NDArray[Any]) -> None:
    if row_id in to:
        raise BatchingError(f"values of row {row_id} came twice")
    to[row_id] = values


def _line(values: NDArray[Any], row_ids: Sequence[int]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the values of a rectangle on one line, and where each row begins."""
    num_rows, width = values.shape[:2]
    if num_rows != len(row_ids):
        raise BatchingError(f"values of {num_rows} rows for {len(row_ids)} row ids")
    line = values.reshape(num_rows * width, *values.shape[2:])
    return line, np.arange(num_rows, dtype=np.int64) * width
