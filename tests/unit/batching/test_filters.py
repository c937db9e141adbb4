from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstream.batching.scoring.filters import (
    has_zero_variance,
    overlong_penalty,
    row_weights,
)


def test_edge_case_40_equal_rewards_within_the_tolerance_teach_nothing() -> None:
    assert has_zero_variance([1.0, 1.0])
    assert not has_zero_variance([0.0, 1.0])
    assert has_zero_variance([0.1, 0.1 + 1e-7])
    assert not has_zero_variance([0.1, 0.1 + 1e-5])


def test_edge_case_40_a_group_with_one_member_is_kept() -> None:
    assert not has_zero_variance([1.0])
    assert not has_zero_variance([])


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(1, 0.0), (16_384, 0.0), (16_385, -0.000244), (18_432, -0.5), (20_480, -1.0), (30_000, -1.0)],
)
def test_punishes_long_responses_by_the_golden_vector(num_tokens: int, expected: float) -> None:
    penalty = overlong_penalty(num_tokens, max_tokens=20_480, buffer_tokens=4_096)

    assert penalty == pytest.approx(expected, abs=1e-6)
    assert math.copysign(1, penalty) == (1 if expected == 0 else -1)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("per_row", [1, 1, 1]),
        ("per_trajectory", [0.5, 0.5, 0]),
        ("rollout_mean", [0.75, 0.25, 0]),
    ],
)
def test_weighs_the_rows_of_a_split_trajectory(kind, expected: list[float]) -> None:
    assert row_weights(kind, [3, 1, 0]) == tuple(expected)
    assert row_weights(kind, [0]) == (1.0,)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_rows_of_a_trajectory_weigh_one_together(num_trained: list[int]) -> None:
    for kind in ("per_trajectory", "rollout_mean"):
        assert sum(row_weights(kind, num_trained)) == pytest.approx(1.0)
