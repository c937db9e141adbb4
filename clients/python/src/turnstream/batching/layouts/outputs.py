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
from turnstream.batching.layouts.slots import response_lengths as lengths_of
from turnstream.batching.merge.buffers import offsets_of
from turnstream.errors import BatchingError
from turnstream.types import Ragged, Rows

ResponseValues = dict[int, NDArray[Any]]
"""Row id to the values of its response tokens; real rows only. Views where possible."""


def response_values_left_padded(
    values_BR: NDArray[Any], *, row_ids: Sequence[int], response_lengths: Sequence[int]
) -> ResponseValues:
    """The last values of every row."""
    num_rows, width = _shape(values_BR, len(row_ids))
    require_fits(np.array(response_lengths), width)
    line = values_BR.reshape(num_rows * width, *values_BR.shape[2:])
    first_slots = [(row + 1) * width - length for row, length in enumerate(_ints(response_lengths))]
    return _cut(line, row_ids=row_ids, first_slots=first_slots, lengths=response_lengths)


def response_values_right_padded(
    values_BT: NDArray[Any],
    *,
    row_ids: Sequence[int],
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> ResponseValues:
    """The values of every row from the column before its response on."""
    num_rows, width = _shape(values_BT, len(row_ids))
    prompts, responses = _ints(prompt_lengths), _ints(response_lengths)
    require_fits(np.array(prompts) + np.array(responses), width)
    line = values_BT.reshape(num_rows * width, *values_BT.shape[2:])
    starts = range(0, num_rows * width, width) if width else [0] * num_rows
    return _cut_shifted(line, row_ids=row_ids, starts=starts, prompts=prompts, lengths=responses)


def response_values_packed(values_N: NDArray[Any], bin_of_rows: Packed) -> ResponseValues:
    """The values of every row of a bin from the slot before its response on."""
    num_slots = len(bin_of_rows.input_ids_N)
    if len(values_N) != num_slots:
        raise BatchingError(f"{len(values_N)} values for {num_slots} slots")
    return _cut_shifted(
        values_N,
        row_ids=bin_of_rows.row_id_B.tolist(),
        starts=bin_of_rows.cu_seqlens[:-1].tolist(),
        prompts=bin_of_rows.prompt_length_B.tolist(),
        lengths=bin_of_rows.response_length_B.tolist(),
    )


def response_values_jagged(values_M: NDArray[Any], rows: Jagged) -> ResponseValues:
    """The values of every row by its response offsets."""
    if len(values_M) != rows.response_offsets[-1]:
        raise BatchingError(
            f"{len(values_M)} values for {rows.response_offsets[-1]} response tokens"
        )
    return _cut(
        values_M,
        row_ids=rows.row_id_B.tolist(),
        first_slots=rows.response_offsets[:-1].tolist(),
        lengths=np.diff(rows.response_offsets).tolist(),
    )


def join_by_row_id(parts: Iterable[Mapping[int, NDArray[Any]]], rows: Rows) -> Ragged[Any]:
    """One column beside those of `rows`, from the parts that passes and ranks gave, in any order.

    Inert rows have zeros.
    """
    found: dict[int, NDArray[Any]] = {}
    for part in parts:
        for row_id, values in part.items():
            _add(found, row_id, values)
    any_values = next(iter(found.values()), np.empty(0, np.float32))
    dtype, shape = any_values.dtype, any_values.shape[1:]
    column: list[NDArray[Any]] = []
    for row_id, is_inert, length in zip(
        rows.row_id.tolist(), rows.is_padding.tolist(), lengths_of(rows).tolist(), strict=True
    ):
        values = np.zeros((length, *shape), dtype) if is_inert else found.pop(row_id, None)
        if values is None:
            raise BatchingError(f"no values came for row {row_id}")
        if len(values) != length:
            raise BatchingError(f"{len(values)} values for the {length} of row {row_id}")
        column.append(values)
    if found:
        raise BatchingError(f"values came for rows that are not here: {sorted(found)[:8]}")
    values = np.concatenate(column) if column else np.empty((0, *shape), dtype)
    return Ragged(values, offsets_of([len(own) for own in column]))


def _cut_shifted(
    line: NDArray[Any],
    *,
    row_ids: Sequence[int],
    starts: Sequence[int],
    prompts: Sequence[int],
    lengths: Sequence[int],
) -> ResponseValues:
    first_slots = [start + prompt - 1 for start, prompt in zip(starts, prompts, strict=True)]
    cut = _cut(line, row_ids=row_ids, first_slots=first_slots, lengths=lengths)
    for row_id, start, prompt, length in zip(row_ids, starts, prompts, lengths, strict=True):
        if prompt == 0 and length and row_id >= 0:
            if line.dtype.kind != "f":
                raise BatchingError(
                    f"row {row_id} has no prompt: its first value is unknown, and {line.dtype} has "
                    "no NaN to say so"
                )
            unknown = np.full((1, *line.shape[1:]), np.nan, line.dtype)
            cut[row_id] = np.concatenate([unknown, line[start : start + length - 1]])
    return cut


def _cut(
    line: NDArray[Any],
    *,
    row_ids: Sequence[int],
    first_slots: Sequence[int],
    lengths: Sequence[int],
) -> ResponseValues:
    cut: ResponseValues = {}
    for row_id, first, length in zip(_ints(row_ids), first_slots, _ints(lengths), strict=True):
        if row_id >= 0:
            _add(cut, row_id, line[first : first + length])
    return cut


def _add(to: ResponseValues, row_id: int, values: NDArray[Any]) -> None:
    if row_id in to:
        raise BatchingError(f"values of row {row_id} came twice")
    to[row_id] = values


def _shape(values: NDArray[Any], num_rows: int) -> tuple[int, int]:
    if len(values) != num_rows:
        raise BatchingError(f"values of {len(values)} rows for {num_rows} row ids")
    return num_rows, values.shape[1]


def _ints(values: Sequence[int]) -> list[int]:
    """Also of arrays: a dictionary of numpy numbers would print, and pickle, as such."""
    return [int(value) for value in values]
