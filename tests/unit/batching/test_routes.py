from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstream.batching.routes import Routes, left_padded_routes, place_routes, route_column
from turnstream.errors import BatchingError, RowTooLongError
from turnstream.testing import assert_same


def routes(*captured: int, expert: int = 3, layers: int = 1, topk: int = 2) -> list[Any]:
    return [np.full((tokens, layers, topk), expert, np.int64) for tokens in captured]


def test_case_11_routes_stand_at_the_first_tokens_and_the_dummy_everywhere_else() -> None:
    column = route_column(routes(2, 4), [3, 4])

    placed = left_padded_routes(column, lengths_B=np.array([3, 4], np.int32), width=4)

    assert placed.choices[:, :, 0].tolist() == [
        [[0, 1], [3, 3], [3, 3], [0, 1]],
        [[3, 3], [3, 3], [3, 3], [3, 3]],
    ]
    assert placed.is_missing.tolist() == [[1, 0, 0, 1], [0, 0, 0, 0]]
    assert placed.choices.dtype == np.uint8


@pytest.mark.parametrize(
    ("largest", "dtype"),
    [(255, np.uint8), (256, np.int16), (300, np.int16), (32_767, np.int16), (32_768, np.int32)],
)
def test_case_11_the_type_is_the_narrowest_that_holds_every_row(largest: int, dtype: Any) -> None:
    column = route_column([*routes(1), *routes(1, expert=largest)], [1, 1])

    assert column.values.dtype == dtype
    assert column.values.max() == largest


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (routes(4), "routes of row 1: 4 captured tokens of 3"),
        (routes(0), "routes of row 1: 0 captured tokens of 3"),
        ([[[[3, 3]]]], "routes of row 1: a list, not an integer array"),
        (routes(1, layers=2), r"routes of row 1: shape \(2, 2\) is not \(1, 2\) of row 0"),
        (routes(1, expert=-1), "routes of row 1: expert -1"),
        ([np.ones((1, 1, 2))], "routes of row 1: float64"),
        ([np.ones((1, 2), np.int64)], r"routes of row 1: int64\[1, 2\]"),
    ],
)
def test_case_11_routes_that_are_none_are_refused(wrong: list[Any], message: str) -> None:
    with pytest.raises(BatchingError, match=message):
        route_column([*routes(1), *wrong], [3, 3])


def test_an_expert_that_int32_cannot_hold_is_refused() -> None:
    with pytest.raises(BatchingError, match="expert 2147483648"):
        route_column(routes(1, expert=2**31), [1])


def test_routes_of_another_number_of_rows_are_refused() -> None:
    with pytest.raises(BatchingError, match="routes of 1 rows for 2 rows"):
        route_column(routes(1), [1, 1])


def test_routes_go_into_the_slots_of_any_layout() -> None:
    placed = place_routes(
        route_column(routes(2, 1), [3, 2]), starts=np.array([0, 4], np.int64), num_slots=6
    )

    assert placed.is_missing.tolist() == [0, 0, 1, 1, 0, 1]
    assert placed.choices[2:4, 0].tolist() == [[0, 1], [0, 1]]


def test_a_row_longer_than_the_width_is_refused() -> None:
    with pytest.raises(RowTooLongError):
        left_padded_routes(route_column(routes(1), [5]), lengths_B=np.array([5], np.int32), width=4)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=5),
    st.integers(1, 3),
    st.sampled_from([1, 255, 256, 40_000]),
    st.integers(0, 2**32 - 1),
)
def test_agrees_with_placing_route_by_route(
    parts: list[tuple[int, int]], topk: int, largest: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    captured = [rng.integers(0, largest + 1, (count, 2, topk)) for count, _ in parts]
    lengths = [count + more for count, more in parts]
    width = max(lengths)

    column = route_column(captured, lengths)
    placed = left_padded_routes(column, lengths_B=np.array(lengths, np.int32), width=width)

    most = max(int(own.max()) for own in captured)
    dtype = np.uint8 if most < 256 else np.int16 if most < 32_768 else np.int32
    choices = np.empty((len(parts), width, 2, topk), dtype)
    is_missing = np.empty((len(parts), width), np.bool_)
    for row, own in enumerate(captured):
        for column_t in range(width):
            token = column_t - (width - lengths[row])
            is_missing[row, column_t] = not 0 <= token < len(own)
            choices[row, column_t] = own[token] if 0 <= token < len(own) else range(topk)
    assert_same(placed, Routes(choices=choices, is_missing=is_missing))
