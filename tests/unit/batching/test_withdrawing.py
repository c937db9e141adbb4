"""Groups of withdrawn plans, put back into the fold without their dead members."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from testkit import ZERO_VARIANCE, config, manifest, sealed, trajectory_plan
from testkit.runs.folds import apply, awaiting, died, fold, key, opened, restored, samples
from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.decisions import GroupDropped
from turnstream.batching.fold.readiness import RunFold
from turnstream.batching.fold.withdrawing import state_before, with_planned_reward
from turnstream.batching.merge.plan import GroupPlan, Manifest
from turnstream.types import PlansWithdrawn, SealedTrajectory, TrajectoryState

CONFIG = config(2)
REFILL = replace(CONFIG, deadline_policy="refill", max_refills=3, group_deadline_s=1.0)
ALL = [0, 1, 2]
INCOMPLETE = TrajectoryState.INCOMPLETE


def seal(group_id: str, sample: int) -> SealedTrajectory:
    return sealed(group_id, sample=sample, reward=float(sample == 0))


def planned_fold(*group_ids: str, of: BatchingConfig = CONFIG) -> RunFold:
    """Return a fold whose groups, of three members each, are all taken by a plan."""
    events = [
        event
        for name in group_ids
        for event in (opened(3, group_id=name), *(seal(name, sample) for sample in ALL))
    ]
    folded, _ = fold(events, of)
    folded.take(folded.ready)
    return folded


def plan_of(*group_ids: str) -> Manifest:
    groups = [
        GroupPlan(
            group_id=name,
            prompt_uid="",
            trajectories=tuple(trajectory_plan(name, sample=sample) for sample in ALL),
        )
        for name in group_ids
    ]
    return replace(manifest(*group_ids), groups=tuple(groups), last_event_id="9-0")


def put_back(folded: RunFold, **left: list[int]) -> PlansWithdrawn:
    """Withdraw the plan of these groups with the samples that are left; return its event."""
    members = {key(s, group_id=name): seal(name, s) for name, own in left.items() for s in own}
    folded.state = state_before([plan_of(*left)], members, folded.state)
    planned = [key(sample, group_id=name) for name in left for sample in ALL]
    return PlansWithdrawn(step=1, dead=tuple(each for each in planned if each not in members))


def withdraw(folded: RunFold, **left: list[int]) -> list[Any]:
    return folded.apply("20-0", put_back(folded, **left))


def names(folded: RunFold) -> list[str]:
    return [group.group_id for group in folded.ready]


def test_groups_come_back_before_all_others_in_the_order_of_their_plans() -> None:
    folded = planned_fold("a", "b")
    apply(folded, opened(1, group_id="c"), sealed("c"), first=15)

    decided = withdraw(folded, a=ALL, b=ALL)

    assert decided == []
    assert names(folded) == ["a", "b", "c"]
    assert folded.state.decided == {}
    assert [group.completed_by for group in folded.ready[:2]] == ["9-0", "9-0"]
    assert [group.opened_by for group in folded.ready[:2]] == ["0-0", "0-1"]
    assert samples(folded)[0] == ALL


def test_groups_of_several_plans_keep_the_order_of_the_steps() -> None:
    plans = [plan_of("a", "b"), replace(plan_of("c"), step=2, last_event_id="8-0")]
    keys = [key(sample, group_id=name) for name in "abc" for sample in ALL]

    state = state_before(plans, {each: sealed(*each[:1]) for each in keys}, RunFold(CONFIG).state)

    assert [(name, group.opened_by) for name, group in state.groups.items()] == [
        ("a", "0-0"),
        ("b", "0-1"),
        ("c", "0-2"),
    ]
    assert state.ready["c"] == "8-0"


def test_group_continues_without_its_dead_members_and_replaces_none() -> None:
    whole = planned_fold("a", of=REFILL)
    withdraw(whole, a=ALL)

    assert apply(whole, died(2, group_id="a"), first=30) == []
    assert samples(whole) == [[0, 1]]
    for folded in (planned_fold("a", of=REFILL), RunFold(REFILL)):  # also of a removed group
        decided = withdraw(folded, a=[0, 2])

        assert (decided, samples(folded)) == ([], [[0, 2]])
        assert folded.ready[0].completed_by == "20-0"
        assert apply(folded, seal("a", 1), first=30) == []
        assert samples(folded) == [[0, 2]]


def test_state_of_the_fold_stays_unchanged() -> None:
    # The leader continues with it if the store refuses the withdrawal.
    folded = planned_fold("a", "b")
    before = deepcopy(folded.state)

    put_back(RunFold(CONFIG, folded.state), a=[0, 1])

    assert folded.state == before


@pytest.mark.parametrize(
    ("changes", "left", "state"),
    [
        ({}, [1], INCOMPLETE),
        ({}, [], INCOMPLETE),
        ({"group_filters": ZERO_VARIANCE}, [1, 2], TrajectoryState.FILTERED),
        ({"max_tokens_per_micro_batch": 3, "over_long": "refuse"}, ALL, INCOMPLETE),
    ],
    ids=["one left", "none left", "equal rewards", "too long"],
)
def test_group_that_the_config_in_force_does_not_train_is_dropped(
    changes: dict[str, Any], left: list[int], state: TrajectoryState
) -> None:
    folded = planned_fold("a", "b")
    folded.revise("15-0", replace(CONFIG, **changes))

    dropped = withdraw(folded, a=left)

    assert isinstance(dropped[-1], GroupDropped)
    assert {each.state for each in dropped} == {state}
    if left != ALL:
        assert dropped[-1].keys == tuple(key(sample, group_id="a") for sample in left)
    assert folded.ready == ()


def test_late_member_does_not_join_after_the_withdrawal() -> None:
    folded = planned_fold("a", of=replace(CONFIG, surplus="keep"))
    late = sealed("a", sample=1, attempt=1)
    apply(folded, late, first=15)

    withdraw(folded, a=[0, 2])

    assert apply(folded, late, first=15) == []
    assert samples(folded) == [[0, 2]]


def test_withdrawal_is_the_same_when_repeated_and_from_a_snapshot() -> None:
    folded = planned_fold("a", "b")
    event = put_back(folded, a=[0, 2], b=[1])
    other = restored(folded, CONFIG)

    decided = folded.apply("20-0", event)
    before = deepcopy(folded.state)

    assert folded.apply("20-0", event) == []
    assert other.apply("20-0", event) == decided
    assert other.state == folded.state == before


@pytest.mark.parametrize(
    ("changes", "reward"),
    [
        ({}, 0.25),
        # The plan has the reward, but not its components.
        ({"estimator": "gdpo", "component_weights": (("x", 1.0), ("y", 1.0))}, None),
        ({"reward_source": "sum_of_turns"}, None),
        ({"overlong_length": 4, "overlong_buffer": 2}, 0.75),  # with a penalty of 0.5
        ({"length_reward_weight": 1.0}, 0.25),  # which the plan does not record
    ],
)
def test_late_reward_of_a_withdrawn_plan_comes_from_the_plan(
    changes: dict[str, Any], reward: float | None
) -> None:
    plan = replace(trajectory_plan(), reward=0.25)
    config = replace(CONFIG, **changes)

    rewarded = with_planned_reward(awaiting(0), plan, config=config)

    assert (rewarded.reward, rewarded.awaits_reward) == (reward, False)
    own = sealed("a", reward=1.0)
    assert with_planned_reward(own, trajectory_plan("a"), config=config) is own
