from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import config, sealed, shape
from testkit.runs import folds
from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.decisions import Decision, GroupDropped, MemberDropped
from turnstream.batching.fold.readiness import RunFold
from turnstream.batching.planning.selection import Selector
from turnstream.types import (
    BatchDue,
    Event,
    RewardPosted,
    RolledBack,
    RunClosed,
    SealedTrajectory,
    Status,
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
    def expired(self) -> list[str]:
        """Groups that were too old, in order."""
        drops = [each for each in self.decided if isinstance(each, GroupDropped)]
        assert {drop.state for drop in drops} <= {TrajectoryState.EXPIRED}
        return [drop.group_id for drop in drops]

    @property
    def masked_versions(self) -> tuple[int, ...] | None:
        """Versions whose tokens are not trained, if there is a choice."""
        return self.selector.choice and self.selector.choice.masked_versions


def opened(*names: str) -> list[Event]:
    return [folds.opened(1, group_id=name) for name in names]


def announced(*steps: int) -> list[Event]:
    return [VersionAnnounced(version=v, step=s, lineage="main") for v, s in enumerate(steps)]


def one(name: str, version: int | None = None, **fields: Any) -> SealedTrajectory:
    return sealed(name, version=version, **fields)


def mixed(name: str, *runs: tuple[int, int]) -> SealedTrajectory:
    """A trajectory of one turn whose 3 tokens several versions sampled."""
    return one(name, turns=[shape(2, 3)], turn_versions=[runs])


def awaiting(member: SealedTrajectory) -> SealedTrajectory:
    return replace(member, reward=None, awaits_reward=True)


def policy(name: Any, batch_groups: int = 1, **fields: Any) -> BatchingConfig:
    return replace(config(batch_groups), max_age_policy=name, **fields)


# Step 4 trains the weights made after step 3: those of version v were made after step v.
HISTORY = [*announced(0, 1, 2, 3), *opened("a", "b", "c")]


@pytest.mark.parametrize(
    ("selection", "versions", "expected"),
    [
        ("in_order", (2, 3, 1), ["a", "b"]),
        ("oldest_weights", (2, 3, 1), ["c", "a"]),
        ("oldest_weights", (None, 3, 1), ["c", "b"]),  # groups of no known version come last
        ("ready_first", (2, 3, 1), ["b", "c"]),
    ],
)
def test_batch_takes_the_groups_that_the_run_prefers(
    selection: Any, versions: Any, expected: Any
) -> None:
    planner = Planner(replace(config(2), selection=selection), HISTORY)
    of_a, of_b, of_c = versions

    planner.apply(one("b", of_b), one("c", of_c), one("a", of_a), BatchDue(step=4))

    assert planner.chosen == expected


@pytest.mark.parametrize(
    ("of", "events", "expired", "chosen", "masked"),
    [
        (policy("drop"), [one("a", 1), one("b", 2)], ["a"], ["b"], ()),
        # a token that will not be trained is never too old
        (
            policy("drop", mask_truncated=True),
            [
                folds.opened(2, group_id="d"),
                one("d", 1, status=Status.TRUNCATED),
                one("d", 3, sample=1),
            ],
            [],
            ["d"],
            (),
        ),
        # weights that a rollback has undone
        (policy("drop"), [RolledBack(step=1), one("a", 3), one("b")], ["a"], ["b"], ()),
        (policy("keep", selection="in_order"), [one("a", 0)], [], ["a"], ()),
        # only versions that sampled the batch are masked
        (policy("mask"), [mixed("a", (1, 1), (3, 2))], [], ["a"], (1,)),
        # nothing is left to train of "a" and "b"
        (
            policy("mask"),
            [one("a", 1), mixed("b", (0, 1), (1, 2)), one("c", 3)],
            ["a", "b"],
            ["c"],
            (),
        ),
    ],
    ids=["whole", "not trained", "undone", "kept", "in part", "nothing left"],
)
def test_old_tokens_expire_or_are_masked(
    of: BatchingConfig, events: Any, expired: Any, chosen: Any, masked: Any
) -> None:
    planner = Planner(of, [*HISTORY, *events, BatchDue(step=4)])

    assert (planner.expired, planner.chosen, planner.masked_versions) == (expired, chosen, masked)
    for drop in planner.decided:
        assert isinstance(drop, GroupDropped)
        assert drop.keys == (TrajectoryKey(drop.group_id, 0),)
        assert drop.reason == "tokens more than 1 steps old when step 4 was planned"


def test_member_that_awaits_its_reward_in_an_expired_group_is_surplus() -> None:
    of = policy("drop", surplus="keep")
    waiting = [folds.opened(2, 1, group_id="s"), one("s", 1), awaiting(one("s", 1, sample=1))]
    planner = Planner(of, [*HISTORY, *waiting, BatchDue(step=4)])

    (left_over,) = [each for each in planner.decided if isinstance(each, MemberDropped)]
    assert planner.expired == ["s"]
    assert (left_over.key, left_over.state) == (TrajectoryKey("s", 1), TrajectoryState.SURPLUS)


def test_tokens_of_unannounced_versions_are_masked_with_those_above() -> None:
    # Versions 10, 20 and 30 were announced, after steps 1, 2 and 3.
    known = [VersionAnnounced(version=10 * n, step=n, lineage="main") for n in (1, 2, 3)]
    planner = Planner(policy("mask"), [*known, *opened("a")])

    planner.apply(mixed("a", (5, 1), (25, 2)), BatchDue(step=5))

    assert planner.masked_versions == (5,)


def test_choice_waits_for_enough_fresh_groups_unless_the_run_ends() -> None:
    planner = Planner(policy("drop", batch_groups=2), HISTORY)

    planner.apply(one("a", 1), one("b", 2), BatchDue(step=4))
    first = planner.chosen
    planner.apply(one("c", 3), BatchDue(step=4))
    ended = Planner(policy("drop", batch_groups=2), HISTORY)
    ended.apply(one("a", 1), one("b", 2), one("c", 1), RunClosed(), BatchDue(step=4))

    assert (first, planner.chosen, ended.chosen) == ([], ["b", "c"], ["b"])


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

    planner.apply(folds.died(0, group_id="b"))
    stood = planner.chosen
    planner.apply(folds.died(0, group_id="a"))

    assert (stood, planner.chosen) == (["a"], [])


def test_a_choice_falls_when_a_member_joins_one_of_its_groups() -> None:
    of = replace(config(), selection="in_order", surplus="keep")
    two = [folds.opened(3, 1, group_id=name) for name in "ab"]
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
