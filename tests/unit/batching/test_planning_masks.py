from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from testkit import config, sealed, shape
from testkit.planning import plan, ready
from turnstream.types import Denominators, Status

MASKING = replace(config(), mask_truncated=True)
CUT_OFF = [
    sealed("a", reward=1.0),
    sealed("a", sample=1, reward=0.0),
    sealed("a", sample=2, reward=-1.0, status=Status.TRUNCATED, version=4),
]


@pytest.mark.parametrize(
    ("masked_reward", "advantages"),
    [("keep", [1.0, 0.0, -1.0]), ("leave_out", [0.707106, -0.707106, 0.0])],
)
def test_masked_trajectory_counts_in_the_baseline_only_if_configured(
    masked_reward: Any, advantages: list[float]
) -> None:
    manifest = plan(ready("a", *CUT_OFF), of=replace(MASKING, masked_reward=masked_reward))

    planned = manifest.groups[0].trajectories
    assert [t.advantage for t in planned] == pytest.approx(advantages, abs=2e-6)
    assert [t.reward for t in planned] == [1.0, 0.0, -1.0]


def test_a_masked_trajectory_is_in_the_batch_and_in_no_denominator() -> None:
    manifest = plan(ready("a", *CUT_OFF), of=MASKING)

    planned = manifest.groups[0].trajectories
    assert [t.is_masked for t in planned] == [False, False, True]
    assert [t.sequences[0].num_trained_tokens for t in planned] == [3, 3, 0]
    assert (planned[2].oldest_version, planned[2].newest_version) == (None, None)
    assert manifest.mini_batches[0].num_rows == 3
    assert manifest.mini_batches[0].denominators == Denominators(6, 2, 2, 1, 2.0, 0)


def test_whitening_leaves_masked_tokens_out() -> None:
    of = replace(MASKING, estimator="reinforce_pp")

    manifest = plan(ready("a", *CUT_OFF), of=of)

    advantages = [t.advantage for t in manifest.groups[0].trajectories]
    assert advantages[:2] == pytest.approx([1.0, -1.0])


def test_a_baseline_by_length_counts_the_length_of_a_masked_response() -> None:
    of = replace(MASKING, estimator="opo")
    members = [
        sealed("a", reward=0.0, turns=[shape(2, 1)]),
        sealed("a", sample=1, reward=1.0, turns=[shape(2, 3)], status=Status.ABORTED),
    ]

    manifest = plan(ready("a", *members), of=of)

    assert [t.advantage for t in manifest.groups[0].trajectories] == [-0.75, 0.25]


def test_the_estimator_sees_the_reward_with_the_penalty_of_a_long_response() -> None:
    # DAPO's vector: 18,432 tokens of 20,480, the last 4,096 of them punished, cost half a point.
    of = replace(config(), estimator="dr_grpo", overlong_length=20_480, overlong_buffer=4_096)
    long = sealed("a", turns=[shape(2, 18_000), shape(2, 432)])

    manifest = plan(ready("a", long, sealed("a", sample=1)), of=of)

    assert [t.reward for t in manifest.groups[0].trajectories] == [0.5, 1.0]
    assert [t.advantage for t in manifest.groups[0].trajectories] == [-0.25, 0.25]


def test_tokens_of_masked_versions_leave_the_rows_and_the_denominators() -> None:
    turns = [shape(2, 3), shape(1, 2, parent=0, shared=5), shape(4, 1)]
    mixed = sealed("a", turns=turns, turn_versions=[[(1, 2), (3, 1)], [(3, 2)], [(1, 1)]])

    manifest = plan(
        ready("a", mixed, sealed("a", sample=1, reward=0.0, version=1)), masked_versions=(1,)
    )

    first, second = manifest.groups[0].trajectories
    assert manifest.masked_versions == (1,)
    assert [row.num_trained_tokens for row in first.sequences] == [3, 0]
    assert (first.is_masked, first.oldest_version, first.newest_version) == (False, 3, 3)
    assert (second.is_masked, second.sequences[0].num_trained_tokens) == (True, 0)
    assert manifest.mini_batches[0].denominators == Denominators(3, 1, 1, 1, 1.0, 0)
    assert [t.advantage for t in (first, second)] == pytest.approx([0.7071, -0.7071], abs=1e-4)


def test_a_seal_that_says_only_its_oldest_version_is_masked_whole() -> None:
    old = replace(sealed("a"), oldest_version=1, newest_version=3)

    manifest = plan(ready("a", old, sealed("a", sample=1, reward=0.0)), masked_versions=(1,))

    assert [t.is_masked for t in manifest.groups[0].trajectories] == [True, False]
