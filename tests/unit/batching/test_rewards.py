from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from testkit import config, sealed, shape
from turnstream.batching.config.values import RewardSource
from turnstream.batching.scoring.filters import has_zero_variance, overlong_penalty, row_weights
from turnstream.batching.scoring.rewards import (
    planned_reward,
    planned_turn_rewards,
    reward_problem,
    trajectory_reward,
)
from turnstream.batching.scoring.token_advantages import rewards_on_last_token
from turnstream.errors import BatchingError


@pytest.mark.parametrize(
    ("source", "expected"), [("outcome", 1.0), ("sum_of_turns", 0.75), ("last_turn", 0.5)]
)
def test_the_reward_comes_from_its_declared_source(source: RewardSource, expected: float) -> None:
    trajectory = sealed(turns=[shape(), shape()], turn_rewards=[0.25, 0.5])

    assert trajectory_reward(trajectory, source=source) == expected


def test_case_36_reward_of_an_earlier_turn_counts_in_the_sum_only() -> None:
    # The reference ignores it, unless its turn was merged into the last row.
    plain = sealed(turns=[shape(), shape()], turn_rewards=[0.0, 1.0])
    early = sealed(turns=[shape(), shape()], turn_rewards=[5.0, 1.0])

    rewards = [
        (trajectory_reward(t, source="sum_of_turns"), trajectory_reward(t, source="last_turn"))
        for t in (plain, early)
    ]

    assert rewards == [(1.0, 1.0), (6.0, 1.0)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("outcome", [0.0, 0.0, 1.0]),
        ("sum_of_turns", [0.25, 0.0, 0.5]),
        ("last_turn", [0.0, 0.0, 0.5]),
    ],
)
def test_sum_of_turn_rewards_is_compared(source: RewardSource, expected: list[float]) -> None:
    trajectory = sealed(turns=[shape()] * 3, turn_rewards=[0.25, 0.0, 0.5])
    of = replace(config(), reward_source=source)
    penalised = replace(of, overlong_length=9, overlong_buffer=2)  # 9 response tokens: -1

    assert planned_turn_rewards(trajectory, of) == expected
    assert sum(expected) == planned_reward(trajectory, of)
    assert planned_turn_rewards(trajectory, penalised) == [*expected[:2], expected[2] - 1.0]
    assert sum(expected) - 1.0 == planned_reward(trajectory, penalised)


def test_components_are_planned_as_their_weighted_sum() -> None:
    of = replace(config(), estimator="gdpo", component_weights=(("a", 2.0), ("b", 0.5)))
    trajectory = replace(sealed(reward=None), reward_components={"a": 1.0, "b": 3.0, "c": 9.0})

    assert planned_reward(trajectory, of) == 3.5


def test_case_34_a_scalar_stands_on_the_last_response_token() -> None:
    placed = rewards_on_last_token(np.array([1, 0.5]), lengths_B=np.array([3, 1]))

    assert [row.tolist() for row in placed] == [[0, 0, 1], [0.5]]
    assert placed.values.dtype == np.float32


def test_case_34_scalar_of_an_empty_response_must_be_zero() -> None:
    # The reference raises IndexError.
    nothing = rewards_on_last_token(np.array([1.0, 0.0]), lengths_B=np.array([1, 0]))

    with pytest.raises(BatchingError, match=r"row 1 has a reward of 0\.5 and no response token"):
        rewards_on_last_token(np.array([1.0, 0.5]), lengths_B=np.array([1, 0]))
    assert [row.tolist() for row in nothing] == [[1.0], []]


@pytest.mark.parametrize(
    "turn_rewards", [[math.inf, -math.inf], [1.7e308, 1.7e308], [math.nan, 1.0]]
)
def test_turns_whose_rewards_have_no_sum_are_named_and_stop_no_plan(
    turn_rewards: list[float],
) -> None:
    # An exact sum of these raises: the planner would have failed at this event again and again.
    trajectory = sealed(turns=[shape(), shape()], turn_rewards=turn_rewards)

    problem = reward_problem(trajectory, replace(config(), reward_source="sum_of_turns"))

    assert problem == "has a reward of nan"


def test_components_whose_weighted_sum_is_no_number_are_named() -> None:
    of = replace(config(), estimator="gdpo", component_weights=(("a", 1e300), ("b", -1e300)))
    trajectory = replace(sealed(), reward_components={"a": 1e20, "b": 1e20})

    assert reward_problem(trajectory, of) == "has a reward of nan"


@pytest.mark.parametrize(
    ("metrics", "problem"),
    [
        ({"w": 0.0}, ""),
        ({"w": 2.5}, ""),
        ({"v": 1.0}, "has no metric 'w', which baseline_weight='w' needs"),
        ({"w": -0.5}, "has a weight of -0.5 as its metric 'w'"),
        ({"w": math.inf}, "has a weight of inf as its metric 'w'"),
        ({"w": math.nan}, "has a weight of nan as its metric 'w'"),
    ],
)
def test_trajectory_without_a_weight_for_the_baseline_is_named(
    metrics: dict[str, float], problem: str
) -> None:
    of = replace(config(), estimator="opo", baseline_weight="w")

    assert reward_problem(sealed(metrics=metrics), of) == problem


@pytest.mark.parametrize("source", ["sum_of_turns", "last_turn"])
def test_case_27_outcome_reward_without_turn_rewards_is_refused_for_turns(
    source: RewardSource,
) -> None:
    # It would have counted as 0. The reference refuses a batch with both kinds, in either order.
    of = replace(config(), reward_source=source)
    turns = [shape(), shape()]

    outcome = sealed(reward=1.0, turns=turns, turn_rewards=[0.0, 0.0])

    assert reward_problem(outcome, of) == (
        f"has an outcome reward of 1.0 and none in its turns, which reward_source={source!r} reads"
    )
    for reward, of_turns in [(None, [0.0, 0.0]), (0.0, [0.0, 0.0]), (1.0, [0.0, 1.0])]:
        assert reward_problem(sealed(reward=reward, turns=turns, turn_rewards=of_turns), of) == ""


def test_case_27_turn_rewards_without_an_outcome_are_refused_for_outcomes() -> None:
    turns = sealed(reward=None, turns=[shape()], turn_rewards=[1.0])

    assert reward_problem(turns, config()) == "has no reward, which reward_source='outcome' needs"


def test_case_40_rewards_within_the_tolerance_are_equal() -> None:
    assert has_zero_variance([0.1, 0.1 + 1e-7])
    assert not has_zero_variance([0.1, 0.1 + 1e-5])
    assert not has_zero_variance([])


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(1, 0.0), (16_384, 0.0), (16_385, -0.000244), (18_432, -0.5), (20_480, -1.0), (30_000, -1.0)],
)
def test_punishes_long_responses_by_the_golden_vector(num_tokens: int, expected: float) -> None:
    penalty = overlong_penalty(num_tokens, max_tokens=20_480, buffer_tokens=4_096)

    assert penalty == pytest.approx(expected, abs=1e-6)
    assert math.copysign(1, penalty) == (1 if expected == 0 else -1)


def test_row_without_a_trained_token_weighs_one_alone() -> None:
    assert row_weights("rollout_mean", [0]) == row_weights("per_trajectory", [0]) == (1.0,)
