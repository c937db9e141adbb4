"""Trajectories with an error, and groups that wait for members that can still be trained."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import config, sealed, shape
from testkit.planning import plan
from testkit.runs.folds import (
    DEADLINE,
    abandoned,
    apply,
    awaiting,
    died,
    fold,
    granted,
    key,
    missed,
    opened,
    posted,
    samples,
    seals,
)
from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.decisions import GroupCut, GroupDropped, MemberDropped, RefillWanted
from turnstream.types import Event, Purpose, SealedTrajectory, Status, TrajectoryState

DROPPING = config()
LEAVING_OUT = replace(DROPPING, mask_truncated=True, masked_reward="leave_out")
REFILL = replace(LEAVING_OUT, deadline_policy="refill", max_refills=2)
INCOMPLETE = TrajectoryState.INCOMPLETE


def failed(sample: int, **fields: Any) -> SealedTrajectory:
    return replace(sealed(sample=sample, status=Status.ERROR), **fields)


def cut_off(*numbers: int) -> list[Event]:
    return [sealed(sample=sample, status=Status.TRUNCATED) for sample in numbers]


# Trajectories with an error


@pytest.mark.parametrize("fields", [{}, {"reward": None}, {"awaits_reward": True}])
def test_error_trajectory_is_no_member_by_default(fields: Any) -> None:
    folded, (drop,) = fold([opened(3), failed(0, **fields), *seals(1, 2)])

    assert samples(folded) == [[1, 2]]
    assert drop == MemberDropped(
        key=key(0),
        state=INCOMPLETE,
        reason="sample 0 ended with status 'error', and error_trajectories='drop'",
    )
    assert apply(folded, posted(0), missed(0), first=9) == []


@pytest.mark.parametrize(
    ("fields", "num_trained", "baseline"),
    [
        ({"error_trajectories": "drop"}, [3, 3], [0, 1]),
        ({"error_trajectories": "keep"}, [3, 3, 3], [0, 1, 5]),
        ({"error_trajectories": "mask"}, [3, 3, 0], [0, 1, 5]),
        ({"error_trajectories": "mask", "masked_reward": "leave_out"}, [3, 3, 0], [0, 1]),
    ],
)
def test_error_trajectory_trains_and_is_compared_by_setting(
    fields: Any, num_trained: list[int], baseline: list[float]
) -> None:
    of = replace(config(), estimator="dr_grpo", **fields)
    members = [sealed(sample=0, reward=0), sealed(sample=1), failed(2, reward=5.0)]

    folded, _ = fold([opened(3), *members], of)
    trajectories = plan(*folded.ready, of=of).groups[0].trajectories

    assert [sum(row.num_trained_tokens for row in t.sequences) for t in trajectories] == num_trained
    mean = statistics.mean(baseline)
    assert [t.advantage for t in trajectories[:2]] == pytest.approx([0 - mean, 1 - mean])
    if len(baseline) < len(trajectories):
        assert trajectories[2].advantage == 0


def test_error_trajectory_is_refilled_and_counts_in_an_evaluation() -> None:
    refilling = replace(DROPPING, deadline_policy="refill", max_refills=1)

    folded, (_, asked) = fold([opened(), *seals(0), failed(1)], refilling)
    apply(folded, granted(1, sample=1), sealed(sample=1, attempt=1), first=9)
    _, (ended,) = fold([opened(purpose=Purpose.EVAL), *seals(0), failed(1)])

    assert asked == RefillWanted(key=key(1, 1), prompt_uid="uid of g0", number=1)
    assert [member.key for member in folded.ready[0].members] == [key(0), key(1, 1)]
    assert (ended.result.num_trajectories, ended.result.num_lost) == (2, 0)


def test_revision_to_drop_removes_errors_from_all_groups() -> None:
    keeping = replace(DROPPING, error_trajectories="keep", surplus="keep")
    late = replace(awaiting(1), status=Status.ERROR)
    events = [opened(4), failed(0), late, *seals(2)]
    ready = [opened(3, group_id="r"), *seals(0, 1, group_id="r")]
    ready.append(replace(sealed("r", sample=2), status=Status.ERROR))
    folded, _ = fold([*events, *ready], keeping)

    dropped = folded.revise("20-0", replace(keeping, error_trajectories="drop"))

    gone = [each.key for each in dropped if isinstance(each, MemberDropped)]
    assert gone == [key(0), key(1), key(2, group_id="r")]
    assert samples(folded) == [[0, 1]]
    assert folded.state.groups["g0"].pending() == [3]


# Needed members


@pytest.mark.parametrize(
    "status_or_length",
    [{"status": Status.ABORTED}, {"status": Status.ERROR}, {"turns": [shape(2, 9)]}],
)
def test_every_kind_of_masked_member_is_waited_past(status_or_length: Any) -> None:
    of = replace(LEAVING_OUT, overlong_length=8, error_trajectories="mask")

    folded, _ = fold([opened(3, 2), sealed(sample=2, **status_or_length), *seals(0)], of)
    before = folded.num_ready
    apply(folded, *seals(1), first=9)

    assert (before, samples(folded)) == (0, [[0, 1, 2]])


def test_masked_members_count_once_no_other_can_come() -> None:
    waiting = [opened(4, 3), *seals(0, 1), *cut_off(2)]
    ended, _ = fold([*waiting, abandoned(3)], LEAVING_OUT)
    at_deadline, _ = fold([*waiting, DEADLINE], LEAVING_OUT)
    unrewarded, (missing,) = fold([*waiting, awaiting(3), missed(3)], LEAVING_OUT)
    _, (short,) = fold([opened(4, 3), *seals(0), *cut_off(2), DEADLINE], LEAVING_OUT)
    _, (alone,) = fold([opened(2), *cut_off(0), *seals(1)], LEAVING_OUT)

    assert samples(ended) == samples(at_deadline) == samples(unrewarded) == [[0, 1, 2]]
    assert (missing.key, short.state) == (key(3), INCOMPLETE)
    assert short.reason == "its deadline passed: 2 of 3 members, none of sample 1, 3"
    assert alone.reason == "1 valid members, and 2 are needed to compare"


def test_lost_sample_is_refilled_in_place_of_a_masked_one() -> None:
    folded, asked = fold([opened(3, 2), abandoned(2), *seals(0), *cut_off(1)], REFILL)
    _, overdue = fold([opened(4, 2), *seals(0), *cut_off(1), DEADLINE], REFILL)
    _, spared = fold([opened(4, 2), abandoned(2), *seals(0), *cut_off(1)], REFILL)

    assert [each.key for each in asked] == [key(2, 1)]
    assert [each.key for each in overdue] == [key(2, 1)]
    assert spared == []
    apply(folded, granted(1, sample=2), sealed(sample=2, attempt=1), first=9)
    assert samples(folded) == [[0, 1, 2]]
    (again,) = apply(folded, died(2, 1), first=12)
    assert (again.key, folded.num_ready) == (key(2, 2), 0)


def test_group_whose_refills_are_used_up_is_trained_with_masked_members() -> None:
    lost = [abandoned(2), granted(1, sample=2), abandoned(2, 1)]

    folded, _ = fold([opened(3), *seals(0, 1), *lost], replace(REFILL, max_refills=1))
    masked, _ = fold([opened(3, 2), *seals(0, 1), *lost[:1]], REFILL)
    mixed, _ = fold(
        [opened(4, 3), *seals(0, 1), *cut_off(3), *lost], replace(REFILL, max_refills=1)
    )

    assert (folded.num_ready, samples(masked), samples(mixed)) == (0, [[0, 1]], [[0, 1, 3]])


def test_revision_that_keeps_masked_rewards_decides_waiting_groups() -> None:
    folded, _ = fold([opened(3, 2), *cut_off(0), *seals(1)], LEAVING_OUT)
    before = folded.num_ready

    (cut,) = folded.revise("5-0", replace(LEAVING_OUT, masked_reward="keep"))

    assert (before, samples(folded)) == (0, [[0, 1]])
    assert isinstance(cut, GroupCut)


OUTCOMES = ("good", "masked", "lost")


def decided_slowly(
    order: list[tuple[int, str]], *, num_needed: int, leaves_out: bool
) -> tuple[int, list[int], bool]:
    """Return the position of the deciding event, the members then, and whether they train."""
    for position in range(len(order)):
        seen = order[: position + 1]
        members = [sample for sample, outcome in seen if outcome != "lost"]
        counted = [sample for sample, outcome in seen if outcome == "good"]
        if not leaves_out:
            counted = members
        if len(counted) >= num_needed or position == len(order) - 1:
            return position, sorted(members), len(counted) >= min(2, num_needed)
    raise AssertionError("a group has a sample")


@given(
    outcomes=st.lists(st.sampled_from(OUTCOMES), min_size=1, max_size=6),
    rng=st.randoms(use_true_random=False),
    needed=st.integers(1, 6),
    leaves_out=st.booleans(),
)
def test_deciding_event_and_members_are_those_of_a_slow_reference(
    outcomes: list[str], rng: Any, needed: int, leaves_out: bool
) -> None:
    order = list(enumerate(outcomes))
    rng.shuffle(order)
    num_needed = min(needed, len(order))
    of: BatchingConfig = replace(LEAVING_OUT, masked_reward="leave_out" if leaves_out else "keep")
    events: list[Event] = [
        abandoned(sample)
        if outcome == "lost"
        else sealed(
            sample=sample,
            status=Status.TRUNCATED if outcome == "masked" else Status.COMPLETED,
        )
        for sample, outcome in order
    ]
    position, members, trains = decided_slowly(order, num_needed=num_needed, leaves_out=leaves_out)
    trains = trains and any(outcomes[sample] != "masked" for sample in members)

    folded, decisions = fold([opened(len(order), num_needed), *events], of)
    early, _ = fold([opened(len(order), num_needed), *events[:position]], of)

    assert early.num_open_groups == 1
    assert folded.num_open_groups == 0
    assert samples(folded) == ([members] if trains else [])
    drops = [each for each in decisions if isinstance(each, GroupDropped)]
    assert [[k.sample for k in each.keys] for each in drops] == ([] if trains else [members])
