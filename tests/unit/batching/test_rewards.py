from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from turnstream.batching.config import RewardSource
from turnstream.batching.rewards import planned_reward, rewards_on_last_token, trajectory_reward
from turnstream.errors import BatchingError
from turnstream.testing import config, sealed, shape


@pytest.mark.parametrize(
    ("source", "expected"), [("outcome", 1.0), ("sum_of_turns", 0.75), ("last_turn", 0.5)]
)
def test_the_reward_comes_from_its_declared_source(source: RewardSource, expected: float) -> None:
    trajectory = sealed(turns=[shape(), shape()], turn_rewards=[0.25, 0.5])

    assert trajectory_reward(trajectory, source=source) == expected


def test_case_36_a_reward_of_an_earlier_turn_counts_in_the_sum_and_not_in_the_last_turn() -> None:
    # The reference ignores it, unless its turn was merged into the last row.
    plain = sealed(turns=[shape(), shape()], turn_rewards=[0.0, 1.0])
    early = sealed(turns=[shape(), shape()], turn_rewards=[5.0, 1.0])

    rewards = [
        (trajectory_reward(t, source="sum_of_turns"), trajectory_reward(t, source="last_turn"))
        for t in (plain, early)
    ]

    assert rewards == [(1.0, 1.0), (6.0, 1.0)]


def test_components_are_planned_as_their_weighted_sum() -> None:
    of = replace(config(), estimator="gdpo", component_weights=(("a", 2.0), ("b", 0.5)))
    trajectory = replace(sealed(reward=None), reward_components={"a": 1.0, "b": 3.0, "c": 9.0})

    assert planned_reward(trajectory, of) == 3.5


def test_case_34_a_scalar_stands_on_the_last_response_token() -> None:
    placed = rewards_on_last_token(np.array([1, 0.5]), lengths_B=np.array([3, 1]))

    assert [row.tolist() for row in placed] == [[0, 0, 1], [0.5]]
    assert placed.values.dtype == np.float32


def test_case_34_a_scalar_of_an_empty_response_is_refused_unless_it_is_zero() -> None:
    # The reference raises IndexError.
    nothing = rewards_on_last_token(np.array([1.0, 0.0]), lengths_B=np.array([1, 0]))

    with pytest.raises(BatchingError, match=r"row 1 has a reward of 0\.5 and no response token"):
        rewards_on_last_token(np.array([1.0, 0.5]), lengths_B=np.array([1, 0]))
    assert [row.tolist() for row in nothing] == [[1.0], []]
