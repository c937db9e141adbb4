"""Validation of extra columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from testkit import turn
from turnstream.errors import InvalidTurnError
from turnstream.generator.encode.checks import with_checked_extras
from turnstream.generator.encode.encoder import TrajectoryDraft
from turnstream.records.turns import decode_turn
from turnstream.types import DeclaredColumn, TrajectoryKey

IMAGES = DeclaredColumn(name="x", per="items", dtype="float32", shape=(2,))
POSITIONS = DeclaredColumn(name="x", per="token", dtype="int32", shape=(2,))
ROUTES = DeclaredColumn(name="x", per="first_tokens", dtype="uint8", shape=(1, 2))
STYLE = DeclaredColumn(name="x", per="row", dtype="float16", shape=(2,), is_constant=True)
TEACHER = DeclaredColumn(name="x", per="response_token", dtype="float32")
BARE = turn("ab", "CD")


def checked(column: DeclaredColumn, values: Any) -> np.ndarray[Any, Any]:
    return with_checked_extras(BARE, {"x": values}, [column]).extras["x"]


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        (TEACHER, [-1, -2.5], [-1.0, -2.5]),
        (TEACHER, np.array([-1, -2], np.int8), [-1.0, -2.0]),
        (POSITIONS, np.arange(8).reshape(4, 2), np.arange(8).reshape(4, 2).tolist()),
        (ROUTES, [[[0, 255]]], [[[0, 255]]]),
        (STYLE, [1, 2], [[1.0, 2.0]]),
        (STYLE, [[1, 2]], [[1.0, 2.0]]),
        (IMAGES, [], []),
    ],
)
def test_lists_and_arrays_become_arrays_of_the_declared_type(
    column: DeclaredColumn, values: Any, expected: Any
) -> None:
    array = checked(column, values)

    assert array.tolist() == expected
    assert array.dtype == column.dtype
    assert array.shape[1:] == column.shape


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        (TEACHER, [-1.0], "has 1 values for 2 response tokens"),
        (TEACHER, [-1.0, float("nan")], r"nan at position 1 is not a finite float32"),
        (TEACHER, [1e300, -1.0], r"1e\+300 at position 0 is not a finite float32"),
        (TEACHER, ["a", "b"], "are numbers for float32, not <U1"),
        (TEACHER, [True, False], "are numbers for float32, not bool"),
        (TEACHER, [[1.0], [1.0, 2.0]], "is no array of numbers"),
        (TEACHER, [[1.0], [2.0]], r"has the shape \(2, 1\), not \(n\)"),
        (TEACHER, None, "is missing, and not declared optional"),
        (POSITIONS, [[0, 2**31]] * 4, r"2147483648 at position \[0, 1\] is not an int32 \(-214748"),
        (POSITIONS, [[0.0, 1.0]] * 4, "are numbers for int32, not float64"),
        (POSITIONS, [[0, 1]] * 3, "has 3 values for 2 prompt and 2 response tokens"),
        (STYLE, [1, 2, 3], r"has the shape \(3,\), not \(n, 2\)"),
        (STYLE, [1e6, 0], r"1000000(.0)? at position \[0, 0\] is not a finite float16"),
        (ROUTES, [[[0, 1]], [[-1, 2]]], r"-1 at position \[1, 0, 0\] is not an expert \(0 to 255"),
        (replace(ROUTES, dtype="int16"), [[[-1, 0]]], r"-1 at .* is not an expert \(0 to 32767"),
        (ROUTES, [[[0, 256]]], r"256 at position \[0, 0, 1\] is not an expert \(0 to 255\)"),
        (ROUTES, [], "has 0 values for 1 to 4 first tokens"),
        (ROUTES, [[[0, 1]]] * 5, "has 5 values for 1 to 4 first tokens"),
        (ROUTES, [[[0, 1, 2]]], r"has the shape \(1, 1, 3\), not \(n, 1, 2\)"),
        (ROUTES, [[[0, 1]], [[0, 1], [0, 1]]], "is no array of numbers"),
        (ROUTES, [[[0.0, 1.0]]], "are numbers for uint8, not float64"),
        (ROUTES, [[0, 1, 2]], r"has the shape \(1, 3\), not \(n, 1, 2\)"),
    ],
)
def test_invalid_value_is_refused_with_column_value_and_position(
    column: DeclaredColumn, values: Any, message: str
) -> None:
    # So does the reference, which also refuses every list. Here a list of numbers is accepted.
    with pytest.raises(InvalidTurnError, match=rf"^extras\['x'\]: .*{message}"):
        checked(column, values)


def test_undeclared_column_is_refused() -> None:
    with pytest.raises(InvalidTurnError, match=r"^extras\['y'\]: the run declares only x$"):
        with_checked_extras(BARE, {"x": [-1, -1], "y": [1]}, [TEACHER])
    with pytest.raises(InvalidTurnError, match=r"^extras\['y'\]: the run declares no extra"):
        with_checked_extras(BARE, {"y": [1]}, [])


def test_optional_columns_and_items_may_be_left_out() -> None:
    optional = replace(TEACHER, is_optional=True)

    assert with_checked_extras(BARE, None, [optional]).extras == {}
    assert with_checked_extras(BARE, {"x": None}, [IMAGES]).extras == {}
    assert with_checked_extras(BARE, None, []) is BARE


def test_a_refused_column_leaves_the_draft_as_it_was() -> None:
    draft = TrajectoryDraft(TrajectoryKey("g", 0), extra_columns=[STYLE])
    one, other = (with_checked_extras(BARE, {"x": [n, n]}, [STYLE]) for n in (1, 2))
    draft.add(one)

    with pytest.raises(InvalidTurnError, match="declared constant"):
        draft.add(other)

    again = decode_turn(draft.add(one).record)
    assert again.index == 1
    assert again.extras["x"].num_shared == 1
