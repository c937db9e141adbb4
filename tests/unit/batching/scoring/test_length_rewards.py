"""Rewards for length that the estimator sees and the record does not, and limits of lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import config, sealed, shape
from testkit.planning import plan, ready
from testkit.runs.folds import fold, key, opened, samples, seals
from turnstream.batching.config import BatchingConfig
from turnstream.batching.scoring.filters import is_compared, is_masked, length_problem
from turnstream.batching.scoring.rewards import length_rewards
from turnstream.types import SealedTrajectory, Status, TrajectoryState

SHAPED = replace(config(), estimator="dr_grpo", length_reward_weight=1.0)


def members(*of: tuple[int, float], **fields: Any) -> list[SealedTrajectory]:
    """Trajectories of these response tokens and rewards."""
    return [
        sealed("a", sample=sample, reward=reward, turns=[shape(2, length)], **fields)
        for sample, (length, reward) in enumerate(of)
    ]


def test_equal_lengths_have_no_reward() -> None:
    assert length_rewards(members((7, 1), (7, 0)), SHAPED) == [0.0, 0.0]
    assert length_rewards([], SHAPED) == []


def test_correct_is_a_raw_reward_from_the_bound_on() -> None:
    # The penalty of its length takes half a point of each reward, and changes no answer.
    of = replace(SHAPED, correct_reward=0.6, overlong_length=4, overlong_buffer=4)

    assert length_rewards(members((1, 0.6), (2, 0.59), (3, 0.6)), of) == [0.5, 0.0, -0.5]


@pytest.mark.parametrize("source", ["sum_of_turns", "last_turn"])
def test_correct_is_judged_by_the_reward_of_the_declared_source(source: Any) -> None:
    of = replace(SHAPED, reward_source=source)
    short = sealed("a", reward=0.0, turns=[shape(2, 1)], turn_rewards=[1.0])
    long = sealed("a", reward=1.0, turns=[shape(2, 1)] * 2, turn_rewards=[0.0, 0.0])

    assert length_rewards([short, long], of) == [0.5, -0.5]


def test_trajectory_that_is_left_out_changes_no_length_reward() -> None:
    of = replace(SHAPED, mask_truncated=True, masked_reward="leave_out")
    cut_off = sealed("a", sample=2, turns=[shape(2, 900)], status=Status.TRUNCATED)

    manifest = plan(ready("a", *members((100, 1), (200, 1)), cut_off), of=of)

    assert [t.advantage for t in manifest.groups[0].trajectories] == [0.5, -0.5, 0.0]


def test_length_reward_comes_with_the_last_turn() -> None:
    of = replace(SHAPED, estimator="gigpo", divide_by_std=False)
    short = sealed("a", reward=1.0, turns=[shape(2, 1), shape(2, 1)], anchors=[1, 2])
    long = sealed("a", sample=1, reward=1.0, turns=[shape(2, 1), shape(2, 3)], anchors=[1, 3])

    manifest = plan(ready("a", short, long), of=of)

    planned = manifest.groups[0].trajectories
    assert [t.advantage for t in planned] == [0.5, -0.5]
    # The state of the second turn is not shared: it has the part of the trajectory alone.
    assert [t.turn_advantages for t in planned] == [(1.0, 0.5), (-1.0, -0.5)]


def slow_shaped(group: list[SealedTrajectory], of: BatchingConfig) -> list[float]:
    """Kimi k1.5 (arXiv:2501.12599), as the paper writes it."""
    lengths = [sum(turn.num_response_tokens for turn in each.turns) for each in group]
    shaped: list[float] = []
    for each, length in zip(group, lengths, strict=True):
        assert each.reward is not None
        reward = 0.0
        if max(lengths) > min(lengths):
            reward = 0.5 - (length - min(lengths)) / (max(lengths) - min(lengths))
        if each.reward < of.correct_reward:
            reward = min(0.0, reward)
        shaped.append(each.reward + of.length_reward_weight * reward)
    return shaped


@given(
    st.lists(st.tuples(st.integers(1, 20), st.sampled_from([0.0, 0.5, 1.0])), min_size=2),
    st.sampled_from([0.1, 1.0, 3.0]),
    st.sampled_from([0.5, 1.0]),
)
def test_planned_advantages_are_those_of_the_shaped_rewards(
    drawn: list[tuple[int, float]], weight: float, bound: float
) -> None:
    of = replace(SHAPED, length_reward_weight=weight, correct_reward=bound)
    group = members(*drawn)

    manifest = plan(ready("a", *group), of=of)

    shaped = slow_shaped(group, of)
    mean = sum(shaped) / len(shaped)
    found = [t.advantage for t in manifest.groups[0].trajectories]
    assert found == pytest.approx([x - mean for x in shaped], abs=1e-6)


LONG = [shape(2, 3), shape(9, 1, parent=0, shared=5)]
"""Merged a row of 15 tokens, otherwise one of 5 and one of 15."""


def refusing(limit: int, **fields: Any) -> BatchingConfig:
    return replace(config(), over_long="refuse", max_tokens_per_micro_batch=limit, **fields)


@pytest.mark.parametrize(
    ("of", "problem"),
    [
        (refusing(15), ""),
        (refusing(14), "has a row of 15 tokens, which costs 15 of the 14 that a micro-batch may"),
        (
            refusing(100, micro_batch_cost="quadratic", cost_per_squared_token=1.0),
            "has a row of 15 tokens, which costs 240 of the 100 that a micro-batch may",
        ),
        (replace(config(), max_tokens_per_micro_batch=3), ""),  # a pass alone
    ],
)
def test_trajectory_is_refused_for_the_cost_of_its_longest_row(
    of: BatchingConfig, problem: str
) -> None:
    assert length_problem(sealed(turns=LONG), of) == problem


MASKING = replace(config(), mask_truncated=True)


@pytest.mark.parametrize("status", Status)
def test_truncated_response_is_masked_if_configured(status: Status) -> None:
    trajectory = sealed(status=status)

    assert is_masked(trajectory, MASKING) == (status in (Status.TRUNCATED, Status.ABORTED))
    assert not is_masked(trajectory, config())


@pytest.mark.parametrize(("num_tokens", "expected"), [(9, False), (10, False), (11, True)])
def test_overlong_is_judged_by_response_tokens_of_all_turns(
    num_tokens: int, expected: bool
) -> None:
    of = replace(MASKING, overlong_length=10)
    trajectory = sealed(turns=[shape(50, 4), shape(50, num_tokens - 4, trained=0)])

    assert is_masked(trajectory, of) is expected


@pytest.mark.parametrize(("masked_reward", "expected"), [("keep", True), ("leave_out", False)])
def test_a_masked_trajectory_is_compared_if_the_run_keeps_its_reward(
    masked_reward: Any, expected: bool
) -> None:
    of = replace(MASKING, masked_reward=masked_reward)

    assert is_compared(sealed(status=Status.ABORTED), of) is expected
    assert is_compared(sealed(), of)


def test_group_continues_without_its_overlong_member() -> None:
    events = [opened(3), *seals(0), sealed(sample=1, turns=LONG), *seals(2)]

    decided, (drop,) = fold(events, refusing(14))

    assert (drop.state, drop.key) == (TrajectoryState.INCOMPLETE, key(1))
    assert drop.reason.startswith("sample 1 has a row of 15 tokens")
    assert samples(decided) == [[0, 2]]
