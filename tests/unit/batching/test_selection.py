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


class Told:
    """A fold and a selector that were told the same events."""

    def __init__(self, of: BatchingConfig, events: Iterable[Event] = ()) -> None:
        self.fold, self.selector = RunFold(of), Selector(of)
        self.decided: list[Decision] = []
        self.num_events = 0
        self.tell(*events)

    def tell(self, *events: Event) -> None:
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
    told = Told(replace(config(2), selection=selection), HISTORY)

    told.tell(one("b", 3), one("c", 1), one("a", 2), BatchDue(step=4))

    assert told.chosen == expected


def test_groups_of_no_known_version_come_behind_those_of_old_ones() -> None:
    told = Told(replace(config(2), selection="oldest_weights"), HISTORY)

    told.tell(one("a"), one("b", 3), one("c", 1), BatchDue(step=4))

    assert told.chosen == ["c", "b"]


def test_a_group_with_a_token_that_is_too_old_expires_whole() -> None:
    told = Told(policy("drop"), HISTORY)

    told.tell(one("a", 1), one("b", 2), BatchDue(step=4))

    (drop,) = told.dropped
    assert (drop.state, drop.keys) == (TrajectoryState.EXPIRED, (TrajectoryKey("a", 0),))
    assert drop.reason == "tokens more than 1 steps old when step 4 was planned"
    assert told.chosen == ["b"]
    assert told.fold.num_ready == 1


def test_a_token_that_will_not_be_trained_makes_no_group_expire() -> None:
    told = Told(policy("drop", mask_truncated=True), HISTORY)

    told.tell(one("a", 1, status=Status.TRUNCATED), BatchDue(step=4))

    assert told.chosen == ["a"]


def test_group_of_undone_weights_expires_by_the_rollback_step() -> None:
    told = Told(policy("drop"), HISTORY)

    told.tell(RolledBack(step=1), one("a", 3), one("b"), BatchDue(step=4))

    assert told.expired == ["a"]
    assert told.chosen == ["b"]


def test_tokens_of_unannounced_versions_are_masked_with_those_above() -> None:
    told = Told(policy("mask"), SPARSE)
    mixed = one("a", turns=[shape(2, 3)], turn_versions=[[(5, 1), (25, 2)]])

    told.tell(mixed, BatchDue(step=5))

    assert told.selector.choice is not None
    assert told.selector.choice.masked_versions == (5,)


def test_old_tokens_are_trained_where_the_run_keeps_them() -> None:
    told = Told(policy("keep", selection="in_order"), HISTORY)

    told.tell(one("a", 0), BatchDue(step=4))

    assert told.chosen == ["a"]
    assert told.selector.choice is not None
    assert told.selector.choice.masked_versions == ()
    assert told.selector.num_over_age(told.selector.choice.groups, step=4) == 1


def test_too_old_versions_are_masked_only_where_they_sampled_the_batch() -> None:
    told = Told(policy("mask"), HISTORY)
    mixed = one("a", turns=[shape(2, 3)], turn_versions=[[(1, 1), (3, 2)]])

    told.tell(mixed, BatchDue(step=4))

    assert told.selector.choice is not None
    assert told.selector.choice.masked_versions == (1,)


def test_a_group_of_which_nothing_is_left_to_train_expires() -> None:
    told = Told(policy("mask"), HISTORY)
    of_two = one("b", turns=[shape(2, 3)], turn_versions=[[(0, 1), (1, 2)]])

    told.tell(one("a", 1), of_two, one("c", turns=[shape(2, 3, trained=0)]), BatchDue(step=4))

    assert told.expired == ["a", "b"]
    assert told.chosen == ["c"]


def test_choice_waits_until_a_later_event_has_enough_fresh_groups() -> None:
    told = Told(policy("drop", batch_groups=2), HISTORY)

    told.tell(one("a", 1), one("b", 2), BatchDue(step=4))
    first = told.chosen
    told.tell(one("c", 3), BatchDue(step=4))

    assert (first, told.chosen) == ([], ["b", "c"])


def test_fresh_groups_make_the_last_batch_of_a_run() -> None:
    told = Told(policy("drop", batch_groups=2), HISTORY)

    told.tell(one("a", 1), one("b", 2), one("c", 1), RunClosed(), BatchDue(step=4))

    assert told.chosen == ["b"]


def test_a_choice_stands_whatever_comes_until_its_plan_is_written() -> None:
    told = Told(replace(config(), selection="oldest_weights"), HISTORY)
    told.tell(one("a", 3), BatchDue(step=4))

    told.tell(one("b", 0), BatchDue(step=4), BatchDue(step=5))
    stood = told.chosen
    told.fold.take(told.fold.ready[:1])
    told.selector.pass_step(4)
    told.tell(BatchDue(step=4))
    after_its_plan = told.chosen
    told.tell(BatchDue(step=5))

    assert (stood, after_its_plan, told.chosen) == (["a"], [], ["b"])


def test_a_choice_falls_when_a_member_dies() -> None:
    told = Told(policy("drop"), HISTORY)
    told.tell(one("a", 2), one("b", 2), BatchDue(step=4))

    told.tell(TrajectoryDied(key=TrajectoryKey("b", 0), reason="why"))
    stood = told.chosen
    told.tell(TrajectoryDied(key=TrajectoryKey("a", 0), reason="why"))

    assert (stood, told.chosen) == (["a"], [])


def test_a_choice_falls_when_a_member_joins_one_of_its_groups() -> None:
    of = replace(config(), selection="in_order", surplus="keep")
    two = [GroupOpened(group_id=name, prompt_uid="", num_samples=3, num_needed=1) for name in "ab"]
    told = Told(of, [*two, one("a"), one("b"), BatchDue(step=1)])

    told.tell(one("b", sample=1), awaiting(one("a", sample=1)))
    stood = told.chosen
    told.tell(RewardPosted(key=TrajectoryKey("a", 1), reward=0.5))
    fell = told.chosen
    told.tell(BatchDue(step=1), one("a", sample=2))

    assert (stood, fell, told.chosen) == (["a"], [], [])
    told.tell(BatchDue(step=1))
    assert told.selector.choice is not None
    assert told.selector.choice.groups == told.fold.ready[:1]


def test_member_that_awaits_its_reward_in_an_expired_group_is_surplus() -> None:
    of = policy("drop", surplus="keep")
    spare = GroupOpened(group_id="s", prompt_uid="", num_samples=2, num_needed=1)
    told = Told(of, [*HISTORY, spare, one("s", 1), awaiting(one("s", 1, sample=1))])

    told.tell(BatchDue(step=4))

    (left_over,) = [each for each in told.decided if isinstance(each, MemberDropped)]
    assert told.expired == ["s"]
    assert (left_over.key, left_over.state) == (TrajectoryKey("s", 1), TrajectoryState.SURPLUS)


# --------------------------------------------------------------------------------------
# laws

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

    then = Told(of, history[: at + 1])
    later = Told(of, history)

    assert later.chosen == then.chosen
    assert later.expired == then.expired


@given(policies, selections, st.lists(st.integers(0, 9), min_size=1, max_size=30))
def test_run_continues_with_late_groups(name: str, selection: str, lags: list[int]) -> None:
    # A batch that lacks groups is followed by fresh ones, as admission lets them in for the old.
    told = Told(policy(name, batch_groups=2, selection=selection), announced(0))
    step, num_groups = 1, 0
    for lag in [*lags, *[0] * 12]:
        group_id = f"g{num_groups}"
        num_groups += 1
        told.tell(*opened(group_id), one(group_id, max(0, step - 1 - lag)))
        if told.fold.num_ready >= 2:
            told.tell(BatchDue(step=step))
        if told.selector.choice is not None:
            told.fold.take(told.selector.choice.groups)
            told.selector.pass_step(step)
            told.tell(VersionAnnounced(version=step, step=step, lineage="main"))
            step += 1

    num_trained = 2 * (step - 1)
    assert step > 6
    assert num_trained + len(told.expired) + told.fold.num_ready == num_groups
