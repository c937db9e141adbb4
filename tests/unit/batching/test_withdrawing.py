"""Groups of withdrawn plans, put back into the fold as they were, but for their dead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from testkit import config, manifest, sealed, trajectory_plan
from turnstream.batching.fold.decisions import GroupDropped
from turnstream.batching.fold.readiness import RunFold
from turnstream.batching.fold.withdrawing import (
    WithdrawnGroup,
    with_planned_reward,
    withdrawn_groups,
)
from turnstream.batching.scoring.rewards import planned_reward
from turnstream.records.snapshots import PlannerSnapshot, decode_snapshot, encode_snapshot
from turnstream.types import (
    GroupOpened,
    PlansWithdrawn,
    RewardPosted,
    SealedTrajectory,
    TrajectoryDied,
    TrajectoryKey,
    TrajectoryState,
)


def fold_with_plan(*group_ids: str, **fields: Any) -> RunFold:
    """A fold whose groups, of three members each, are all taken by a plan."""
    fold = RunFold(replace(config(2), **fields))
    number = 0
    for group_id in group_ids:
        number += 1
        fold.apply(f"{number}-0", GroupOpened(group_id=group_id, prompt_uid="", num_samples=3))
        for sample in range(3):
            number += 1
            fold.apply(f"{number}-0", sealed(group_id, sample=sample, reward=float(sample == 0)))
    fold.take(fold.ready)
    return fold


def back(group_id: str, *left: int, place: int = 0) -> WithdrawnGroup:
    """A group of three, of which these samples are left."""
    return WithdrawnGroup(
        group_id=group_id,
        prompt_uid="",
        members=tuple(
            sealed(group_id, sample=sample, reward=float(sample == 0)) for sample in left
        ),
        planned=tuple(TrajectoryKey(group_id, sample) for sample in range(3)),
        completed_by="9-0",
        opened_by=f"0-{place}",
    )


def withdraw(fold: RunFold, *groups: WithdrawnGroup) -> list[Any]:
    """Put groups back, and tell the fold who is dead."""
    fold.put_back(groups)
    dead = {
        key
        for group in groups
        for key in group.planned
        if key not in {member.key for member in group.members}
    }
    return fold.apply("20-0", PlansWithdrawn(step=1, dead=tuple(sorted(dead))))


def record_of(fold: RunFold) -> bytes:
    """All that it knows."""
    known = PlannerSnapshot(
        position="20-0", step=1, manifest_hash="", next_row_id=0, fold=fold.snapshot()
    )
    return encode_snapshot(known)


def names(fold: RunFold) -> list[str]:
    return [group.group_id for group in fold.ready]


def test_groups_come_back_before_all_others_in_the_order_of_their_plans() -> None:
    fold = fold_with_plan("a", "b")
    fold.apply("15-0", GroupOpened(group_id="c", prompt_uid="", num_samples=1))
    fold.apply("16-0", sealed("c"))

    decided = withdraw(fold, back("a", 0, 1, 2), back("b", 0, 1, 2, place=1))

    assert decided == []
    assert names(fold) == ["a", "b", "c"]
    assert fold.decided == ()
    assert [group.completed_by for group in fold.ready[:2]] == ["9-0", "9-0"]
    assert len(fold.ready[0].members) == 3


def test_group_continues_without_its_dead_members() -> None:
    fold = fold_with_plan("a")

    decided = withdraw(fold, back("a", 0, 2))

    assert decided == []
    (ready,) = fold.ready
    assert [member.key.sample for member in ready.members] == [0, 2]
    assert ready.completed_by == "20-0"


def test_a_fold_that_shares_what_it_knows_stays_as_it_is() -> None:
    # The leader's own fold, which continues if the store refuses the withdrawal.
    fold = fold_with_plan("a", "b")
    before = record_of(fold)

    RunFold(config(2), fold.snapshot()).put_back([back("a", 0, 1)])

    assert record_of(fold) == before


@pytest.mark.parametrize("left", [(1,), ()])
def test_a_group_with_nothing_left_to_compare_is_dropped(left: tuple[int, ...]) -> None:
    fold = fold_with_plan("a")

    (dropped,) = withdraw(fold, back("a", *left))

    assert isinstance(dropped, GroupDropped)
    assert dropped.state is TrajectoryState.INCOMPLETE
    assert dropped.keys == tuple(TrajectoryKey("a", sample) for sample in left)
    assert fold.ready == ()


def test_a_group_whose_rewards_are_equal_without_its_dead_is_filtered() -> None:
    fold = fold_with_plan("a", "b", drop_zero_variance=True)

    (dropped,) = withdraw(fold, back("a", 1, 2), back("b", 0, 1, 2, place=1))

    assert (dropped.group_id, dropped.state) == ("a", TrajectoryState.FILTERED)
    assert names(fold) == ["b"]


def test_planned_group_takes_no_member_and_replaces_no_dead() -> None:
    fold = fold_with_plan("a", deadline_policy="refill", max_refills=3, group_deadline_s=1.0)

    decided = withdraw(fold, back("a", 0, 2))
    late = fold.apply("30-0", sealed("a", sample=1))

    assert decided == []
    assert late == []
    assert [member.key.sample for member in fold.ready[0].members] == [0, 2]


def test_a_member_that_dies_afterwards_is_not_replaced_either() -> None:
    fold = fold_with_plan("a", deadline_policy="refill", max_refills=3, group_deadline_s=1.0)
    withdraw(fold, back("a", 0, 1, 2))

    died = TrajectoryDied(key=TrajectoryKey("a", 2), reason="checksum")

    assert fold.apply("30-0", died) == []
    assert [member.key.sample for member in fold.ready[0].members] == [0, 1]


def test_a_fold_that_has_forgotten_a_group_knows_its_members_again() -> None:
    fold = RunFold(config(2))
    withdraw(fold, back("a", 0, 2))

    assert fold.apply("30-0", sealed("a", sample=1)) == []
    assert names(fold) == ["a"]


def test_late_member_does_not_join_after_the_withdrawal() -> None:
    fold = fold_with_plan("a", surplus="keep")
    late = sealed("a", sample=1, attempt=1)
    fold.apply("15-0", late)

    withdraw(fold, back("a", 0, 2))

    assert fold.apply("15-0", late) == []
    assert [member.key.sample for member in fold.ready[0].members] == [0, 2]


def test_groups_are_judged_by_the_config_in_force() -> None:
    fold = fold_with_plan("a", "b")
    fold.revise("15-0", replace(config(2), max_tokens_per_micro_batch=3, over_long="refuse"))

    dropped = withdraw(fold, back("a", 0, 1, 2))

    assert {each.state for each in dropped} == {TrajectoryState.INCOMPLETE}
    assert fold.ready == ()


def test_hearing_of_a_withdrawal_again_changes_nothing() -> None:
    fold = fold_with_plan("a", "b")
    groups = (back("a", 0, 2), back("b", 1, place=1))
    withdraw(fold, *groups)
    before = snapshot_of(fold)

    event = PlansWithdrawn(step=1, dead=(TrajectoryKey("a", 1), TrajectoryKey("b", 0)))

    assert fold.apply("20-0", event) == []
    assert snapshot_of(fold) == before


def test_fold_from_a_snapshot_judges_as_the_original() -> None:
    fold = fold_with_plan("a", "b")
    fold.put_back((back("a", 0, 2), back("b", 1, place=1)))
    other = decode_snapshot(snapshot_of(fold)).restore_fold(config(2))
    event = PlansWithdrawn(step=1, dead=(TrajectoryKey("a", 1), TrajectoryKey("b", 0)))

    decided = fold.apply("20-0", event)

    assert other.apply("20-0", event) == decided
    assert (other.ready, other.decided) == (fold.ready, fold.decided)


def snapshot_of(fold: RunFold) -> bytes:
    known = PlannerSnapshot(
        position="20-0", step=0, manifest_hash="", next_row_id=0, fold=fold.snapshot()
    )
    return encode_snapshot(known)


def test_plans_return_their_groups_in_order_without_missing_ones() -> None:
    plans = [manifest("a", "b", step=1), replace(manifest("c", step=2), last_event_id="8-0")]
    keys = [t.key for plan in plans for group in plan.groups for t in group.trajectories]
    members = {key: sealed(key.group_id, sample=key.sample) for key in keys[1:]}

    groups = list(withdrawn_groups(plans, members))

    assert [(group.group_id, group.opened_by) for group in groups] == [
        ("a", "0-0"),
        ("b", "0-1"),
        ("c", "0-2"),
    ]
    assert [len(group.members) for group in groups] == [1, 2, 2]
    assert [len(group.planned) for group in groups] == [2, 2, 2]
    assert groups[2].completed_by == "8-0"


def awaiting(**changes: Any) -> SealedTrajectory:
    return replace(sealed("a", reward=None), awaits_reward=True, **changes)


def test_a_reward_that_was_posted_is_taken_from_its_event() -> None:
    posted = RewardPosted(key=TrajectoryKey("a", 0), reward=0.5, reward_components={"x": 1.0})
    plan = replace(trajectory_plan("a"), reward=9.0)

    rewarded = with_planned_reward(awaiting(), plan, posted=posted, config=config())

    assert (rewarded.reward, rewarded.reward_components) == (0.5, {"x": 1.0})
    assert not rewarded.awaits_reward


COMPARED = {"estimator": "gdpo", "component_weights": (("x", 1.0), ("y", 1.0))}


@pytest.mark.parametrize(
    ("changes", "reward"),
    [({}, 0.25), (COMPARED, None), ({"reward_source": "sum_of_turns"}, None)],
)
def test_plan_has_the_reward_if_its_event_is_gone_but_no_parts(
    changes: dict[str, Any], reward: float | None
) -> None:
    plan = replace(trajectory_plan("a"), reward=0.25)

    rewarded = with_planned_reward(
        awaiting(), plan, posted=None, config=replace(config(), **changes)
    )

    assert (rewarded.reward, rewarded.reward_components) == (reward, {})
    assert not rewarded.awaits_reward


def test_a_penalty_for_length_is_not_in_the_reward_again() -> None:
    punished = replace(config(), overlong_length=4, overlong_buffer=2)
    plan = replace(trajectory_plan("a"), reward=0.25)

    rewarded = with_planned_reward(awaiting(), plan, posted=None, config=punished)

    assert rewarded.reward is not None
    assert planned_reward(rewarded, punished) == pytest.approx(0.25)


def test_a_reward_that_was_sealed_stays() -> None:
    own = sealed("a", reward=1.0)

    assert with_planned_reward(own, trajectory_plan("a"), posted=None, config=config()) is own
