"""The fold through random lives of a run, beside a store that only knows what it was told.

The laws: every sealed trajectory is in exactly one place, the same events give the same state also
when each is heard again, or a planner goes on from a snapshot; the groups of a run come to rest,
and none waits for ever once its deadline has fired.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from testkit import config, sealed
from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.decisions import (
    Decision,
    GroupCut,
    GroupDropped,
    MemberDropped,
    RefillWanted,
)
from turnstream.batching.fold.readiness import RunFold
from turnstream.records.snapshots import PlannerSnapshot, decode_snapshot, encode_snapshot
from turnstream.types import (
    DeadlineFired,
    Event,
    GroupOpened,
    RefillGranted,
    RewardPosted,
    TrajectoryAbandoned,
    TrajectoryDied,
    TrajectoryKey,
)


def through_the_record(fold: RunFold) -> RunFold:
    """The fold of a planner that continues from the snapshot of this one."""
    snapshot = PlannerSnapshot(
        position="1-0", step=0, manifest_hash="", next_row_id=0, fold=fold.snapshot()
    )
    return decode_snapshot(encode_snapshot(snapshot)).restore_fold(fold._config)


some = st.integers(0, 10**6)
"""Picks one of however many there are."""


class _Life(RuleBasedStateMachine):
    """Generators, the store and one planner; the ledger is what the decisions make of it."""

    def __init__(self) -> None:
        super().__init__()
        self.config = config()
        self.fold = RunFold(self.config)
        # Events, configs that were revised, and the groups that a plan took.
        self.log: list[Event | BatchingConfig | frozenset[str]] = []
        self.ledger: dict[TrajectoryKey, str] = {}
        self.deadlines: dict[str, int] = {}
        self.refills: set[TrajectoryKey] = set()
        self.num_granted: dict[str, int] = {}
        self.groups: dict[str, str] = {}
        self.samples: dict[str, int] = {}

    @initialize(
        policy=st.sampled_from(["drop", "train_short", "refill"]),
        fallback=st.sampled_from(["drop", "train_short"]),
        surplus=st.sampled_from(["drop", "keep"]),
        filters=st.booleans(),
        most_open=st.sampled_from([0, 3]),
    )
    def begin(
        self, policy: Any, fallback: Any, surplus: Any, filters: bool, most_open: int
    ) -> None:
        self.config = replace(
            self.config,
            deadline_policy=policy,
            refill_fallback=fallback,
            max_refills=3 if policy == "refill" else 0,
            surplus=surplus,
            drop_zero_variance=filters,
            max_open_groups=most_open,
            group_deadline_s=1,
            reward_deadline_s=1,
        )
        self.first_config = self.config
        self.fold = RunFold(self.config)

    # the store

    def post(self, event: Event) -> None:
        self.log.append(event)
        self.carry_out(self.fold.apply(f"{len(self.log)}-0", event))

    def carry_out(self, decisions: list[Decision]) -> None:
        for decision in [each for each in decisions if self.fold.still_holds(each)]:
            match decision:
                case MemberDropped(key=key, state=state):
                    assert self.ledger[key] in {"sealed", "awaiting", state}
                    self.ledger[key] = state
                case GroupDropped(group_id=group_id, state=state, keys=keys):
                    for key in keys:
                        assert self.ledger[key] in {"sealed", "awaiting", state}
                        self.ledger[key] = state
                    self.settle(group_id, state)
                case GroupCut(group_id=group_id):
                    self.settle(group_id, "decided")
                case RefillWanted():
                    self.grant(decision)

    def settle(self, group_id: str, state: str) -> None:
        if self.groups[group_id] == state or (
            state == "decided" and self.groups[group_id] != "open"
        ):
            return
        self.groups[group_id] = state
        self.deadlines.pop(group_id, None)
        self.refills = {key for key in self.refills if key.group_id != group_id}
        for key, entry in self.ledger.items():
            if key.group_id == group_id and entry in {"open", "awaiting"}:
                self.ledger[key] = "surplus"

    def grant(self, wanted: RefillWanted) -> None:
        group_id = wanted.key.group_id
        assert wanted.number == self.num_granted.get(group_id, 0) + 1 <= self.config.max_refills
        assert self.groups[group_id] in {"open", "decided"}
        self.num_granted[group_id] = wanted.number
        self.groups[group_id] = "open"
        self.deadlines[group_id] = wanted.number
        key = wanted.key
        while key in self.ledger or key in self.refills:
            key = key._replace(attempt=key.attempt + 1)
        self.refills.add(key)
        self.post(RefillGranted(key=key, number=wanted.number))

    def pick(self, number: int, state: str) -> TrajectoryKey:
        found = [key for key, entry in self.ledger.items() if entry == state]
        return found[number % len(found)]

    def has(self, state: str) -> bool:
        return state in self.ledger.values()

    # generators

    @rule(num_samples=st.integers(1, 4), spared=st.integers(0, 2))
    def open_group(self, num_samples: int, spared: int) -> None:
        group_id = f"g{len(self.groups)}"
        needed = max(1, num_samples - spared)
        self.groups[group_id] = "open"
        self.samples[group_id] = num_samples
        self.deadlines[group_id] = 0
        self.ledger |= {TrajectoryKey(group_id, sample): "open" for sample in range(num_samples)}
        self.post(
            GroupOpened(
                group_id=group_id, prompt_uid="", num_samples=num_samples, num_needed=needed
            )
        )

    @precondition(lambda self: "open" in self.groups.values())
    @rule(number=some, sample=some)
    def open_another_attempt(self, number: int, sample: int) -> None:
        groups = [group for group, state in self.groups.items() if state == "open"]
        group_id = groups[number % len(groups)]
        key = TrajectoryKey(group_id, sample % self.samples[group_id], 1)
        while key in self.ledger or key in self.refills:
            key = key._replace(attempt=key.attempt + 1)
        self.ledger[key] = "open"

    @precondition(lambda self: self.refills)
    @rule(number=some)
    def take_refill(self, number: int) -> None:
        key = sorted(self.refills)[number % len(self.refills)]
        self.refills.discard(key)
        self.ledger[key] = "open"

    @precondition(lambda self: self.has("open"))
    @rule(number=some, reward=st.sampled_from([0.0, 1.0, None]))
    def seal(self, number: int, reward: float | None) -> None:
        key = self.pick(number, "open")
        self.ledger[key] = "sealed"
        self.post(sealed(*key[:1], sample=key.sample, attempt=key.attempt, reward=reward))

    @precondition(lambda self: self.has("open"))
    @rule(number=some)
    def seal_without_reward(self, number: int) -> None:
        key = self.pick(number, "open")
        self.ledger[key] = "awaiting"
        event = sealed(key.group_id, sample=key.sample, attempt=key.attempt, reward=None)
        self.post(replace(event, awaits_reward=True))

    @precondition(lambda self: self.has("awaiting"))
    @rule(number=some)
    def post_reward(self, number: int) -> None:
        key = self.pick(number, "awaiting")
        self.ledger[key] = "sealed"
        self.post(RewardPosted(key=key, reward=float(number % 2)))

    @precondition(lambda self: self.has("open"))
    @rule(number=some)
    def abandon(self, number: int) -> None:
        key = self.pick(number, "open")
        self.ledger[key] = "abandoned"
        self.post(TrajectoryAbandoned(key=key, reason=""))

    # time and damage

    @precondition(lambda self: self.deadlines)
    @rule(number=some)
    def fire_group(self, number: int) -> None:
        group_id = sorted(self.deadlines)[number % len(self.deadlines)]
        num_refills = self.deadlines.pop(group_id)
        self.post(DeadlineFired(group_id=group_id, num_refills=num_refills))
        assert self.is_decided(group_id) or group_id in self.deadlines

    @precondition(lambda self: self.has("awaiting"))
    @rule(number=some)
    def fire_reward(self, number: int) -> None:
        key = self.pick(number, "awaiting")
        self.post(DeadlineFired(group_id=key.group_id, awaited=key))
        assert self.ledger[key] != "awaiting"

    @precondition(lambda self: self.has("sealed"))
    @rule(number=some)
    def die(self, number: int) -> None:
        key = self.pick(number, "sealed")
        self.ledger[key] = "dead"
        self.post(TrajectoryDied(key=key, reason=""))

    @precondition(lambda self: self.fold.num_ready)
    @rule(number=some)
    def plan(self, number: int) -> None:
        groups = self.fold.ready[: 1 + number % self.fold.num_ready]
        self.log.append(frozenset(group.group_id for group in groups))
        for group in groups:
            for member in group.members:
                assert self.ledger[member.key] == "sealed"
                self.ledger[member.key] = "planned"
        self.carry_out(self.fold.take(groups))
        for group in groups:
            self.settle(group.group_id, "planned")

    @rule(
        surplus=st.sampled_from(["drop", "keep"]),
        filters=st.booleans(),
        source=st.sampled_from(["outcome", "sum_of_turns"]),
        most_open=st.sampled_from([0, 3]),
    )
    def revise(self, surplus: Any, filters: bool, source: Any, most_open: int) -> None:
        self.config = replace(
            self.config,
            surplus=surplus,
            drop_zero_variance=filters,
            reward_source=source,
            max_open_groups=most_open,
        )
        self.log.append(self.config)
        self.carry_out(self.fold.revise(f"{len(self.log)}-0", self.config))

    @rule()
    def another_planner_takes_over(self) -> None:
        self.fold = RunFold(self.first_config)
        decisions: list[Decision] = []
        for i, entry in enumerate(self.log):
            if isinstance(entry, frozenset):
                decisions += self.fold.take([g for g in self.fold.ready if g.group_id in entry])
            elif isinstance(entry, BatchingConfig):
                decisions += self.fold.revise(f"{i + 1}-0", entry)
            else:
                decisions += self.fold.apply(f"{i + 1}-0", entry)
        before = dict(self.ledger), dict(self.groups), set(self.refills), dict(self.deadlines)
        self.carry_out(decisions)
        assert before == (self.ledger, self.groups, self.refills, self.deadlines)

    # the laws

    def is_decided(self, group_id: str) -> bool:
        return all(waiting.group_id != group_id for waiting in self.fold.waiting())

    @invariant()
    def every_sealed_trajectory_is_in_one_place(self) -> None:
        ready = [member.key for group in self.fold.ready for member in group.members]
        assert len(ready) == len(set(ready))
        open_groups = {waiting.group_id for waiting in self.fold.waiting()}
        for key, entry in self.ledger.items():
            if entry == "sealed":
                assert key in ready or key.group_id in open_groups
            else:
                assert key not in ready

    @invariant()
    def where_open_groups_are_counted_none_is_open_that_is_decided(self) -> None:
        if self.config.max_open_groups and self.config.surplus == "drop":
            assert {self.groups[ready.group_id] for ready in self.fold.ready} <= {"decided"}

    @invariant()
    def what_is_over_has_nothing_open(self) -> None:
        for key, entry in self.ledger.items():
            if self.groups[key.group_id] not in {"open", "decided"}:
                assert entry not in {"open", "awaiting", "sealed"}

    @invariant()
    def an_open_group_has_something_to_wait_for(self) -> None:
        for waiting in self.fold.waiting():
            assert waiting.samples
            has_attempt = any(
                key.group_id == waiting.group_id and entry in {"open", "awaiting"}
                for key, entry in self.ledger.items()
            )
            has_refill = any(key.group_id == waiting.group_id for key in self.refills)
            assert has_attempt or has_refill

    def teardown(self) -> None:
        if self.log:
            assert self.picture(lambda _: 1) == self.picture(lambda i: 1 + i % 3)
            assert self.picture(lambda _: 1) == self.picture(lambda _: 1, cut=through_the_record)

    def picture(
        self, times: Callable[[int], int], *, cut: Callable[[RunFold], RunFold] = lambda fold: fold
    ) -> list[Any]:
        """All that successors come to, hearing event i so many times, and handing on after each."""
        fold = RunFold(self.first_config)
        seen: list[Any] = []
        for i, entry in enumerate(self.log):
            fold = cut(fold)
            if isinstance(entry, frozenset):
                seen += fold.take([g for g in fold.ready if g.group_id in entry])
                continue
            for _ in range(times(i)):
                if isinstance(entry, BatchingConfig):
                    seen += fold.revise(f"{i + 1}-0", entry)
                else:
                    seen += fold.apply(f"{i + 1}-0", entry)
        ready = [(g.group_id, g.completed_by, [m.key for m in g.members]) for g in fold.ready]
        assert ready == [
            (g.group_id, g.completed_by, [m.key for m in g.members]) for g in self.fold.ready
        ]
        return [*seen, *ready, *fold.waiting()]


def test_the_fold_keeps_its_laws_through_a_random_life() -> None:
    run_state_machine_as_test(_Life, settings=settings(stateful_step_count=60, deadline=None))
