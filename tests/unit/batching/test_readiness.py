from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from testkit import config, sealed, shape
from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.decisions import ReadyGroup
from turnstream.batching.fold.readiness import RunFold
from turnstream.types import (
    Event,
    GroupOpened,
    RunClosed,
    SealedTrajectory,
    TrajectoryAbandoned,
    TrajectoryDied,
    TrajectoryKey,
    TrajectoryState,
)

CONFIG = config()
INCOMPLETE, FILTERED = TrajectoryState.INCOMPLETE, TrajectoryState.FILTERED
SURPLUS = TrajectoryState.SURPLUS


def opened(group_id: str = "g0", num_samples: int = 2) -> GroupOpened:
    return GroupOpened(group_id=group_id, prompt_uid=f"uid of {group_id}", num_samples=num_samples)


def abandoned(group_id: str = "g0", sample: int = 0, attempt: int = 0) -> TrajectoryAbandoned:
    return TrajectoryAbandoned(key=TrajectoryKey(group_id, sample, attempt), reason="gave up")


def died(group_id: str = "g0", sample: int = 0, attempt: int = 0) -> TrajectoryDied:
    return TrajectoryDied(key=TrajectoryKey(group_id, sample, attempt), reason="bad checksum")


def fold(events: Iterable[Event], of: BatchingConfig = CONFIG) -> tuple[RunFold, list[Any]]:
    """The state after these events, and all that was decided."""
    state = RunFold(of)
    drops = [drop for i, event in enumerate(events) for drop in state.apply(f"{i}-0", event)]
    return state, drops


def samples(group: ReadyGroup) -> list[int]:
    return [member.key.sample for member in group.members]


def test_a_group_is_ready_when_every_sample_is_sealed() -> None:
    state, drops = fold([opened(), sealed(sample=1, reward=0.0)])
    num_ready_before = state.num_ready

    state.apply("2-0", sealed(sample=0))

    (group,) = state.ready
    assert (num_ready_before, state.num_ready, drops) == (0, 1, [])
    assert (group.group_id, group.prompt_uid, group.completed_by) == ("g0", "uid of g0", "2-0")
    assert samples(group) == [0, 1]


def test_an_abandoned_sample_completes_a_group_that_has_enough_others() -> None:
    state, drops = fold(
        [opened(num_samples=3), sealed(sample=0), abandoned(sample=1), sealed(sample=2)]
    )

    assert [samples(group) for group in state.ready] == [[0, 2]]
    assert drops == []


def test_a_group_of_one_left_is_dropped_as_incomplete() -> None:
    state, (drop,) = fold([opened(), sealed(sample=0), abandoned(sample=1)])

    assert state.ready == ()
    assert (drop.state, drop.keys) == (INCOMPLETE, (TrajectoryKey("g0", 0),))
    assert drop.reason == "1 valid members, and 2 are needed to compare"


def test_a_group_without_any_member_is_dropped_and_names_no_trajectory() -> None:
    _, (drop,) = fold([opened(), abandoned(sample=0), abandoned(sample=1)])

    assert (drop.group_id, drop.state, drop.keys) == ("g0", INCOMPLETE, ())


@pytest.mark.parametrize(
    ("late", "reason"),
    [
        (sealed(sample=0, attempt=1), "its group was decided before it was sealed"),
        (sealed(sample=9), "its group was decided before it was sealed"),
    ],
)
def test_seal_after_its_group_was_decided_is_surplus(late: SealedTrajectory, reason: str) -> None:
    _, (drop,) = fold([opened(), sealed(sample=0), sealed(sample=1), late])

    assert (drop.state, drop.keys, drop.reason) == (SURPLUS, (late.key,), reason)


def test_a_second_sealed_attempt_of_a_sample_is_surplus() -> None:
    state, (drop,) = fold(
        [opened(), sealed(sample=0), sealed(sample=0, attempt=1), sealed(sample=1)]
    )

    assert (drop.state, drop.keys) == (SURPLUS, (TrajectoryKey("g0", 0, 1),))
    assert [m.key.attempt for m in state.ready[0].members] == [0, 0]


def test_a_sample_beyond_the_declared_number_is_surplus() -> None:
    _, (drop,) = fold([opened(), sealed(sample=2)])

    assert (drop.state, drop.reason) == (SURPLUS, "sample 2 of 2")


def test_a_trajectory_of_a_group_that_was_never_opened_is_incomplete() -> None:
    _, (drop,) = fold([sealed("nowhere")])

    assert (drop.state, drop.reason) == (INCOMPLETE, "its group was never opened")


GDPO = replace(CONFIG, estimator="gdpo", component_weights=(("a", 1.0), ("b", 1.0)))


@pytest.mark.parametrize(
    ("of", "unusable", "reason"),
    [
        *[
            (CONFIG, sealed(sample=2, reward=number), f"has a reward of {number}")
            for number in (math.nan, math.inf, -math.inf, 1e31)
        ],
        (CONFIG, sealed(sample=2, turns=[]), "has no turn"),
        (
            CONFIG,
            sealed(sample=2, reward=None),
            "has no reward, which reward_source='outcome' needs",
        ),
        (
            replace(CONFIG, estimator="maxrl"),
            sealed(sample=2, reward=-1.0),
            "has a reward of -1.0, and maxrl divides by the mean reward",
        ),
        (
            GDPO,
            replace(sealed(sample=2), reward_components={"a": 1.0}),
            "has no reward component 'b'",
        ),
    ],
)
def test_member_that_cannot_be_compared_is_incomplete_with_the_reason(
    of: BatchingConfig, unusable: SealedTrajectory, reason: str
) -> None:
    whole = {"a": 1.0, "b": 0.0}
    members = [replace(sealed(sample=s), reward_components=whole) for s in (0, 1)]

    state, (drop,) = fold([opened(num_samples=3), *members, unusable], of)

    assert samples(state.ready[0]) == [0, 1]
    assert (drop.state, drop.keys) == (INCOMPLETE, (TrajectoryKey("g0", 2),))
    assert drop.reason == f"sample 2 {reason}"


def test_a_reward_is_not_missed_where_the_turns_carry_it() -> None:
    of = replace(CONFIG, reward_source="sum_of_turns")

    state, drops = fold([opened(), *[sealed(sample=s, reward=None) for s in (0, 1)]], of)

    assert (state.num_ready, drops) == (1, [])


def test_equal_rewards_are_filtered_if_configured() -> None:
    of = replace(CONFIG, drop_zero_variance=True)
    equal = [opened(), sealed(sample=0), sealed(sample=1)]

    state, (drop,) = fold(equal, of)
    kept, _ = fold(equal)

    assert (state.num_ready, kept.num_ready) == (0, 1)
    assert (drop.state, drop.reason) == (FILTERED, "all rewards are equal")
    assert drop.keys == (TrajectoryKey("g0", 0), TrajectoryKey("g0", 1))


def test_a_single_sample_is_never_filtered_for_its_variance() -> None:
    of = replace(CONFIG, drop_zero_variance=True)

    state, _ = fold([opened(num_samples=1), sealed(sample=0)], of)

    assert state.num_ready == 1


@pytest.mark.parametrize(
    ("trained", "is_kept"), [([3, 3], False), ([3, 0], True), ([0, 0], True), ([3, 3, 0], False)]
)
def test_case_40_equal_group_with_one_live_member_is_kept(
    trained: list[int], is_kept: bool
) -> None:
    of = replace(CONFIG, drop_zero_variance=True)
    members = [
        sealed(sample=s, turns=[shape(), shape(trained=count)])
        if count
        else sealed(sample=s, turns=[shape(trained=0)])
        for s, count in enumerate(trained)
    ]

    state, _ = fold([opened(num_samples=len(members)), *members], of)

    assert state.num_ready == is_kept


def test_case_40_masked_member_moves_the_baseline_and_keeps_the_group() -> None:
    of = replace(CONFIG, drop_zero_variance=True)
    masked = sealed(sample=2, reward=0.0, turns=[shape(trained=0)])

    state, _ = fold([opened(num_samples=3), sealed(sample=0), sealed(sample=1), masked], of)

    assert state.num_ready == 1


def test_components_are_filtered_only_where_all_of_them_are_equal() -> None:
    of = replace(
        CONFIG,
        estimator="gdpo",
        component_weights=(("a", 1.0), ("b", 1.0)),
        drop_zero_variance=True,
    )
    # The sums are equal and the components are not: the group still teaches something.
    rewards = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}]
    members = [replace(sealed(sample=s), reward_components=rewards[s]) for s in (0, 1)]
    same = [replace(sealed("g1", sample=s), reward_components=rewards[0]) for s in (0, 1)]

    state, (drop,) = fold([opened(), *members, opened("g1"), *same], of)

    assert [group.group_id for group in state.ready] == ["g0"]
    assert (drop.group_id, drop.state) == ("g1", FILTERED)


def test_a_member_that_dies_leaves_the_ready_group() -> None:
    events = [opened(num_samples=3), *[sealed(sample=s) for s in (0, 1, 2)]]

    state, drops = fold([*events, died(sample=1)])

    (group,) = state.ready
    assert (samples(group), group.completed_by, drops) == ([0, 2], "4-0", [])


def test_a_ready_group_with_too_few_left_alive_is_dropped() -> None:
    state, (drop,) = fold([opened(), sealed(sample=0), sealed(sample=1), died(sample=1)])

    assert state.ready == ()
    assert (drop.state, drop.keys) == (INCOMPLETE, (TrajectoryKey("g0", 0),))


def test_a_death_before_the_group_is_complete_ends_the_sample() -> None:
    state, (drop,) = fold([opened(), sealed(sample=0), died(sample=0), sealed(sample=1)])

    assert (state.num_ready, drop.state, drop.keys) == (0, INCOMPLETE, (TrajectoryKey("g0", 1),))


def test_another_attempt_stands_in_for_a_dead_one() -> None:
    events = [opened(), sealed(sample=0), died(sample=0), sealed(sample=0, attempt=1)]

    state, drops = fold([*events, sealed(sample=1)])

    assert ([m.key.attempt for m in state.ready[0].members], drops) == ([1, 0], [])


def test_knows_whether_the_run_is_closed_and_what_is_still_open() -> None:
    state, _ = fold([opened("a"), opened("b"), sealed("a", sample=0), sealed("a", sample=1)])
    before = state.closed

    state.apply("9-0", RunClosed())

    assert (before, state.closed, state.num_open_groups) == (False, True, 1)
