"""Extra columns next to the tokens of every layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from testkit.strategies import extra_columns, scored_rows
from turnstream.batching.layouts.jagged import jagged
from turnstream.batching.layouts.packed import packed
from turnstream.batching.layouts.padded import left_padded, right_padded
from turnstream.batching.layouts.slots import PlacedColumn
from turnstream.types import ExtraColumn, Rows


def left_extras(batch: Rows, *, width: int, response_width: int) -> Mapping[str, PlacedColumn]:
    widths = {"width": width, "response_width": response_width}
    return left_padded(batch, pad_token_id=0, **widths).extras


def slow(column: ExtraColumn, batch: Rows, row: int) -> list[Any]:
    """What a row has, token by token, as lists; of items all of them."""
    values = column.values[row].tolist()
    zero = np.zeros(column.shape, column.dtype).tolist()
    num_tokens, num_response = int(batch.input_ids.lengths[row]), len(batch.loss_mask[row])
    counts = {"token": num_tokens, "first_tokens": num_tokens, "response_token": num_response}
    count = {**counts, "row": 1}.get(column.per, len(values))
    if column.per == "first_tokens":
        zero = np.zeros(column.shape, column.dtype)
        zero[...] = np.arange(column.shape[-1])
        zero = zero.tolist()
    return [values[place] if place < len(values) else zero for place in range(count)]


@st.composite
def batches(draw: st.DrawFn) -> Rows:
    batch = draw(scored_rows())
    return replace(batch, extras=draw(extra_columns(batch)))


@given(batch=batches(), spare=st.integers(0, 2), alignment=st.integers(1, 3), data=st.data())
def test_every_layout_has_the_values_that_one_loop_per_token_finds(
    batch: Rows, spare: int, alignment: int, data: st.DataObject
) -> None:
    lengths, responses = batch.input_ids.lengths.tolist(), batch.loss_mask.lengths.tolist()
    width = max(lengths, default=0) + spare
    response_width = min(width, max(responses, default=0) + spare)
    order = data.draw(st.permutations(range(len(batch))))
    cut = data.draw(st.integers(0, len(batch)))
    bins = [list(order[:cut]), list(order[cut:])]

    left = left_extras(batch, width=width, response_width=response_width)
    right = right_padded(batch, width=width, pad_token_id=0).extras
    flat = jagged(batch).extras
    parts = [one.extras for one in packed(batch, bins=bins, pad_token_id=0, alignment=alignment)]

    for name, column in batch.extras.items():
        token, response, item = 0, 0, 0
        for row, (length, num_response) in enumerate(zip(lengths, responses, strict=True)):
            expected = slow(column, batch, row)
            prompt = length - num_response
            match column.per:
                case "token" | "first_tokens":
                    found = [left[name].values[row][width - length :]]
                    found += [right[name].values[row][:length]]
                    found += [flat[name].values[token : token + length]]
                case "response_token":
                    found = [left[name].values[row][response_width - num_response :]]
                    found += [flat[name].values[response : response + num_response]]
                    shifted = right[name].values[row][max(prompt - 1, 0) :][:num_response]
                    if prompt:
                        found.append(shifted)
                    else:  # nothing scores the first token of a row
                        assert shifted[: num_response - 1].tolist() == expected[1:]
                case "row":
                    found = [placed[name].values[row : row + 1] for placed in (left, right, flat)]
                case "items":
                    end = item + len(expected)
                    found = [placed[name].values[item:end] for placed in (left, right, flat)]
                    item = end
            assert [values.tolist() for values in found] == [expected] * len(found)
            token, response = token + length, response + num_response
        for rows_of_bin, part in zip(bins, parts, strict=True):
            assert part[name].values.tolist() == packed_slowly(
                column, batch, rows_of_bin, alignment
            )
            assert part[name].values.dtype == column.dtype


def packed_slowly(
    column: ExtraColumn, batch: Rows, rows_of_bin: list[int], alignment: int
) -> list[Any]:
    zero = np.zeros(column.shape, column.dtype)
    if column.per == "first_tokens":
        zero[...] = np.arange(column.shape[-1])
    line: list[Any] = []
    for row in rows_of_bin:
        values = slow(column, batch, row)
        if column.per in ("row", "items"):
            line += values
            continue
        length, num_response = int(batch.input_ids.lengths[row]), len(batch.loss_mask[row])
        slots: list[Any] = [zero.tolist()] * (-(-length // alignment) * alignment)
        first = 0 if column.per != "response_token" else length - num_response - 1
        for place, value in enumerate(values):
            if first + place >= 0:
                slots[first + place] = value
        line += slots
    return line
