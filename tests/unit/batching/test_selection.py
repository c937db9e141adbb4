from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import config, sealed, shape
from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.decisions import Decision, GroupDropped, MemberDropped
from turnstream.batching.fold.readiness import RunFold
from turnstream.batching.planning.selection import Selector
from turnstream.types import (
    BatchDue,
    Event,
    GroupOpened,
    RewardPosted,
    RolledBack,
    RunClosed,
    SealedTrajectory,
    Status,
    TrajectoryDied,
    TrajectoryKey,
    TrajectoryState,
    VersionAnnounced,
)


class Planner:
    """A fold and a selector with the same events."""

    def __init__(self, of: BatchingConfig, events: Iterable[Event] = ()) -> None:
        self.fold, self.selector = RunFold(of), Selector(of)
        self.decided: list[Decision] = []
        self.num_events = 0
        self.apply(*events)

    def apply(self, *events: Event) -> None:
        """Apply the next events."""
        for event in events:
            self.num_events += 1
            event_id = f"{self.num_events}-0"
            self.decided += self.fold.apply(event_id, event)
            self.decided += self.selector.apply(event_id, event, self.fold)

    @property
    def chosen(self) -> list[str]:
        """The groups of the next batch, if there is a choice."""
        choice = self.selector.choice
        return [] if choice is None else [group.group_id for group in choice.groups]

    @property
    def dropped(self) -> list[GroupDropped]:
        """Groups that are not trained, in order."""
        return [each for each in self.decided if isinstance(each, GroupDropped)]

    @property
    def expired(self) -> list[str]:
        """Groups that were too old, in order."""
        return [d.group_id for d in self.dropped if d.state is TrajectoryState.EXPIRED]


def opened(*names: str) -> list[Event]:
    return [GroupOpened(group_id=name, prompt_uid="", num_samples=1) for name in names]


def announced(*steps: int) -> list[Event]:
    return [VersionAnnounced(version=v, step=s, lineage="main") for v, s in enumerate(steps)]


def one(name: str, version: int | None = None, **fields: Any) -> SealedTrajectory:
    return sealed(name, version=version, **fields)


def awaiting(member: SealedTrajectory) -> SealedTrajectory:
    return replace(member, reward=None, awaits_reward=True)


def policy(name: Any, batch_groups: int = 1, **fields: Any) -> BatchingConfig:
    return replace(config(batch_groups), max_age_policy=name, **fields)


# Step 4 trains the weights made after step 3: those of version v were made after step v.
HISTORY = [*announced(0, 1, 2, 3), *opened("a", "b", "c")]

# Not every version is announced: 10, 20 and 30 were, after steps 1, 2 and 3.
SPARSE = [
    *(VersionAnnounced(version=10 * step, step=step, lineage="main") for step in (1, 2, 3)),
    *opened("a", "b", "c"),
]


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ("in_order", ["a", "b"]),
        ("oldest_weights", ["c", "a"]),
        ("ready_first", ["b", "c"]),
    ],
)
def test_a_batch_takes_the_groups_that_the_run_prefers(selection: Any, expected: Any) -> None:
    planner = Planner(replace(config(2), selection=selection), HISTORY)

    planner.apply(one("b", 3), one("c", 1), one("a", 2), BatchDue(step=4))

    assert planner.chosen == expected


def test_groups_of_no_known_version_come_behind_those_of_old_ones() -> None:
    planner = Planner(replace(config(2), selection="oldest_weights"), HISTORY)

    planner.apply(one("a"), one("b", 3), one("c", 1), BatchDue(step=4))

    assert planner.chosen == ["c", "b"]


def test_a_group_with_a_token_that_is_too_old_expires_whole() -> None:
    planner = Planner(policy("drop"), HISTORY)

    planner.apply(one("a", 1), one("b", 2), BatchDue(step=4))

    (drop,) = planner.dropped
    assert (drop.state, drop.keys) == (TrajectoryState.EXPIRED, (TrajectoryKey("a", 0),))
    assert drop.reason == "tokens more than 1 steps old when step 4 was planned"
    assert planner.chosen == ["b"]
    assert planner.fold.num_ready == 1


def test_a_token_that_will_not_be_trained_makes_no_group_expire() -> None:
    planner = Planner(policy("drop", mask_truncated=True), HISTORY)

    planner.apply(one("a", 1, status=Status.TRUNCATED), BatchDue(step=4))

    assert planner.chosen == ["a"]


def test_group_of_undone_weights_expires_by_the_rollback_step() -> None:
    planner = Planner(policy("drop"), HISTORY)

    planner.apply(RolledBack(step=1), one("a", 3), one("b"), BatchDue(step=4))

    assert planner.expired == ["a"]
    assert planner.chosen == ["b"]


def test_tokens_of_unannounced_versions_are_masked_with_those_above() -> None:
    planner = Planner(policy("mask"), SPARSE)
    mixed = one("a", turns=[shape(2, 3)], turn_versions=[[(5, 1), (25, 2)]])

    planner.apply(mixed, BatchDue(step=5))

    assert planner.selector.choice is not None
    assert planner.selector.choice.masked_versions == (5,)


def test_old_tokens_are_trained_where_the_run_keeps_them() -> None:
    planner = Planner(policy("keep", selection="in_order"), HISTORY)

    planner.apply(one("a", 0), BatchDue(step=4))

    assert planner.chosen == ["a"]
    assert planner.selector.choice is not None
    assert planner.selector.choice.masked_versions == ()
    assert planner.selector.num_over_age(planner.selector.choice.groups, step=4) == 1


def test_too_old_versions_are_masked_only_where_they_sampled_the_batch() -> None:
    planner = Planner(policy("mask"), HISTORY)
    mixed = one("a", turns=[shape(2, 3)], turn_versions=[[(1, 1), (3, 2)]])

    planner.apply(mixed, BatchDue(step=4))

    assert planner.selector.choice is not None
    assert planner.selector.choice.masked_versions == (1,)


def test_a_group_of_which_nothing_is_left_to_train_expires() -> None:
    planner = Planner(policy("mask"), HISTORY)
    of_two = one("b", turns=[shape(2, 3)], turn_versions=[[(0, 1), (1, 2)]])

    planner.apply(one("a", 1), of_two, one("c", turns=[shape(2, 3, trained=0)]), BatchDue(step=4))

    assert planner.expired == ["a", "b"]
    assert planner.chosen == ["c"]


def test_choice_waits_until_a_later_event_has_enough_fresh_groups() -> None:
    planner = Planner(policy("drop", batch_groups=2), HISTORY)

    planner.apply(one("a", 1), one("b", 2), BatchDue(step=4))
    first = planner.chosen
    planner.apply(one("c", 3), BatchDue(step=4))

    assert (first, planner.chosen) == ([], ["b", "c"])


def test_fresh_groups_make_the_last_batch_of_a_run() -> None:
    planner = Planner(policy("drop", batch_groups=2), HISTORY)

    planner.apply(one("a", 1), one("b", 2), one("c", 1), RunClosed(), BatchDue(step=4))

    assert planner.chosen == ["b"]


def test_a_choice_stands_whatever_comes_until_its_plan_is_written() -> None:
    planner = Planner(replace(config(), selection="oldest_weights"), HISTORY)
    planner.apply(one("a", 3), BatchDue(step=4))

    planner.apply(one("b", 0), BatchDue(step=4), BatchDue(step=5))
    stood = planner.chosen
    planner.fold.take(planner.fold.ready[:1])
    planner.selector.pass_step(4)
    planner.apply(BatchDue(step=4))
    after_its_plan = planner.chosen
    planner.apply(BatchDue(step=5))

    assert (stood, after_its_plan, planner.chosen) == (["a"], [], ["b"])


def test_a_choice_falls_when_a_member_dies() -> None:
    planner = Planner(policy("drop"), HISTORY)
    planner.apply(one("a", 2), one("b", 2), BatchDue(step=4))

    planner.apply(TrajectoryDied(key=TrajectoryKey("b", 0), reason="why"))
    stood = planner.chosen
    planner.apply(TrajectoryDied(key=TrajectoryKey("a", 0), reason="why"))

    assert (stood, planner.chosen) == (["a"], [])


def test_a_choice_falls_when_a_member_joins_one_of_its_groups() -> None:
    of = replace(config(), selection="in_order", surplus="keep")
    two = [GroupOpened(group_id=name, prompt_uid="", num_samples=3, num_needed=1) for name in "ab"]
    planner = Planner(of, [*two, one("a"), one("b"), BatchDue(step=1)])

    planner.apply(one("b", sample=1), awaiting(one("a", sample=1)))
    stood = planner.chosen
    planner.apply(RewardPosted(key=TrajectoryKey("a", 1), reward=0.5))
    fell = planner.chosen
    planner.apply(BatchDue(step=1), one("a", sample=2))

    assert (stood, fell, planner.chosen) == (["a"], [], [])
    planner.apply(BatchDue(step=1))
    assert planner.selector.choice is not None
    assert planner.selector.choice.groups == planner.fold.ready[:1]


def test_member_that_awaits_its_reward_in_an_expired_group_is_surplus() -> None:
    of = policy("drop", surplus="keep")
    spare = GroupOpened(group_id="s", prompt_uid="", num_samples=2, num_needed=1)
    planner = Planner(of, [*HISTORY, spare, one("s", 1), awaiting(one("s", 1, sample=1))])

    planner.apply(BatchDue(step=4))

    (left_over,) = [each for each in planner.decided if isinstance(each, MemberDropped)]
    assert planner.expired == ["s"]
    assert (left_over.key, left_over.state) == (TrajectoryKey("s", 1), TrajectoryState.SURPLUS)


policies = st.sampled_from(["drop", "mask", "keep"])
selections = st.sampled_from(["in_order", "oldest_weights", "ready_first"])


@given(policies, selections, st.lists(st.integers(0, 6), max_size=12), st.data())
def test_a_choice_is_the_same_however_much_came_after_it(
    name: str, selection: str, lags: list[int], data: st.DataObject
) -> None:
    of = policy(name, batch_groups=2, selection=selection)
    names = [f"g{index}" for index in range(len(lags))]
    events: list[Event] = [*announced(*range(7)), *opened(*names)]
    events += [one(own, max(0, 6 - lag)) for own, lag in zip(names, lags, strict=True)]
    at = data.draw(st.integers(len(names) + 7, len(events)))
    history = [*events[:at], BatchDue(step=7), *events[at:]]

    then = Planner(of, history[: at + 1])
    later = Planner(of, history)

    assert later.chosen == then.chosen
    assert later.expired == then.expired
