from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from testkit import assert_same, rows
from testkit.strategies import scored_rows
from turnstream.batching.layouts.jagged import jagged
from turnstream.batching.layouts.outputs import (
    join_by_row_id,
    response_values_jagged,
    response_values_left_padded,
    response_values_packed,
    response_values_right_padded,
)
from turnstream.batching.layouts.packed import packed
from turnstream.batching.layouts.padded import left_padded, right_padded
from turnstream.errors import BatchingError, RowTooLongError
from turnstream.types import Ragged, Rows


def values_of(parts: Mapping[int, NDArray[np.float32]]) -> dict[int, list[float]]:
    return {row_id: values.tolist() for row_id, values in parts.items()}


@pytest.mark.parametrize("dtype", [np.int64, np.bool_])
def test_whole_numbers_say_nothing_of_a_first_token_that_has_no_prompt(dtype: type) -> None:
    # NaN became -9223372036854775808.
    with pytest.raises(BatchingError, match="row 7 has no prompt: its first value is unknown"):
        response_values_right_padded(
            np.zeros((1, 3), dtype), row_ids=[7], prompt_lengths=[0], response_lengths=[2]
        )


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{0: np.ones(1)}], "no values came for row 1"),
        ([{0: np.ones(1), 1: np.ones(3)}], "3 values for the 2 of row 1"),
        ([{0: np.ones(1), 1: np.ones(2)}, {0: np.ones(1)}], "values of row 0 came twice"),
        ([{0: np.ones(1), 1: np.ones(2), 9: np.ones(1)}], r"rows that are not here: \[9\]"),
    ],
)
def test_values_that_are_not_those_of_the_rows_are_refused(
    parts: list[dict[int, NDArray[np.float64]]], message: str
) -> None:
    with pytest.raises(BatchingError, match=message):
        join_by_row_id(parts, rows("aB", "aBC"))


def test_values_of_another_shape_than_the_rows_are_refused() -> None:
    ones = np.ones((2, 2), np.float32)
    [one] = packed(rows("aB"), bins=[[0]], pad_token_id=0)

    with pytest.raises(BatchingError, match="values of 2 rows for 1 row ids"):
        response_values_left_padded(ones, row_ids=[1], response_lengths=[1])
    with pytest.raises(RowTooLongError):
        response_values_left_padded(ones, row_ids=[1, 2], response_lengths=[1, 3])
    with pytest.raises(RowTooLongError):
        response_values_right_padded(
            ones, row_ids=[1, 2], prompt_lengths=[1, 1], response_lengths=[1, 2]
        )
    with pytest.raises(BatchingError, match="came twice"):
        response_values_left_padded(ones, row_ids=[1, 1], response_lengths=[1, 1])
    with pytest.raises(BatchingError, match="3 values for 2 slots"):
        response_values_packed(np.ones(3, np.float32), one)
    with pytest.raises(BatchingError, match="3 values for 1 response tokens"):
        response_values_jagged(np.ones(3, np.float32), jagged(rows("aB")))


@given(st.data(), scored_rows())
def test_every_layout_returns_its_values(data: st.DataObject, batch: Rows) -> None:
    numbers = np.arange(1, len(batch.rewards.values) + 1, dtype=np.float32)
    first_of_empty = (batch.prompt_length == 0) & (batch.rewards.lengths > 0)
    numbers[batch.rewards.offsets[:-1][first_of_empty]] = np.nan
    batch = replace(batch, rewards=Ragged(numbers, batch.rewards.offsets))
    order = data.draw(st.permutations(range(len(batch))))
    bins = [list(order[::2]), list(order[1::2])]
    width = int(batch.input_ids.lengths.max(initial=0))
    response_width = int(batch.loss_mask.lengths.max(initial=0))
    ids = batch.row_id.tolist()
    lengths = batch.loss_mask.lengths.tolist()

    left = left_padded(batch, width=width, response_width=response_width, pad_token_id=0)
    right = right_padded(batch, width=width, pad_token_id=0)
    flat = jagged(batch)
    by_layout = {
        "left": [
            response_values_left_padded(left.rewards_BR, row_ids=ids, response_lengths=lengths)
        ],
        "right": [
            response_values_right_padded(
                right.rewards_BT,
                row_ids=ids,
                prompt_lengths=batch.prompt_length.tolist(),
                response_lengths=lengths,
            )
        ],
        "packed": [
            response_values_packed(one.rewards_N, one)
            for one in packed(batch, bins=bins, pad_token_id=0, alignment=2)
        ],
        "jagged": [response_values_jagged(flat.rewards_M, flat)],
    }

    is_inert = np.repeat(batch.is_padding, batch.rewards.lengths)
    expected = Ragged(np.where(is_inert, np.float32(0), numbers), batch.rewards.offsets)
    for parts in by_layout.values():
        assert_same(join_by_row_id(parts, batch), expected)


def test_vector_values_per_token_are_joined_with_zeros_in_inert_rows() -> None:
    # The zeros of an inert row had one number per token whatever the others had.
    batch = rows("aB", "a|b", "aBC", is_padding=[False, True, False])
    parts = [{0: np.ones((1, 3), np.float32)}, {2: np.full((2, 3), 2, np.float32)}]

    joined = join_by_row_id(parts, batch)
    empty = join_by_row_id([], rows())

    assert (len(empty), empty.values.shape, empty.values.dtype) == (0, (0,), np.float32)
    assert [row.tolist() for row in joined] == [[[1] * 3], [[0] * 3], [[2] * 3] * 2]
