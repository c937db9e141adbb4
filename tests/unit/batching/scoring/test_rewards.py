from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

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
from turnstream.types import SealedTrajectory


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


OF_COMPONENTS: dict[str, Any] = {"estimator": "gdpo", "component_weights": (("a", 2.0), ("b", 0.5))}
OF_HUGE = {**OF_COMPONENTS, "component_weights": (("a", 1e300), ("b", -1e300))}
BY_TURNS = {"reward_source": "sum_of_turns"}
WEIGHED = {"estimator": "opo", "baseline_weight": "w"}
NONE_IN_TURNS = "has an outcome reward of 1.0 and none in its turns"
NO_REWARD = "has no reward, which reward_source='outcome' needs"


def with_turns(reward: float | None, *turn_rewards: float) -> SealedTrajectory:
    return sealed(reward=reward, turns=[shape()] * len(turn_rewards), turn_rewards=turn_rewards)


@pytest.mark.parametrize(
    ("settings", "trajectory", "problem"),
    [
        # An exact sum of these raises: the planner would have failed at this event again and again.
        (BY_TURNS, with_turns(1.0, math.inf, -math.inf), "has a reward of nan"),
        (BY_TURNS, with_turns(1.0, 1.7e308, 1.7e308), "has a reward of nan"),
        (BY_TURNS, with_turns(1.0, math.nan, 1.0), "has a reward of nan"),
        (
            OF_HUGE,
            replace(sealed(), reward_components={"a": 1e20, "b": 1e20}),
            "has a reward of nan",
        ),
        (WEIGHED, sealed(metrics={"w": 0.0}), ""),
        (WEIGHED, sealed(metrics={"w": 2.5}), ""),
        (
            WEIGHED,
            sealed(metrics={"v": 1.0}),
            "has no metric 'w', which baseline_weight='w' needs",
        ),
        *[
            (WEIGHED, sealed(metrics={"w": w}), f"has a weight of {w} as its metric 'w'")
            for w in (-0.5, math.inf, math.nan)
        ],
        # Case 27: it would have counted as 0. The reference refuses a batch with both kinds.
        *[
            (
                {"reward_source": source},
                with_turns(1.0, 0.0, 0.0),
                f"{NONE_IN_TURNS}, which reward_source={source!r} reads",
            )
            for source in ("sum_of_turns", "last_turn")
        ],
        *[
            (BY_TURNS, with_turns(reward, 0.0, last), "")
            for reward, last in [(None, 0.0), (0.0, 0.0), (1.0, 1.0)]
        ],
        ({}, with_turns(None, 1.0), NO_REWARD),
    ],
)
def test_reward_that_cannot_be_compared_has_its_reason(
    settings: dict[str, Any], trajectory: SealedTrajectory, problem: str
) -> None:
    assert reward_problem(trajectory, replace(config(), **settings)) == problem


def test_components_are_planned_as_their_weighted_sum() -> None:
    trajectory = replace(sealed(reward=None), reward_components={"a": 1.0, "b": 3.0, "c": 9.0})

    assert planned_reward(trajectory, replace(config(), **OF_COMPONENTS)) == 3.5


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
