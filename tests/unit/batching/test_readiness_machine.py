"""The fold through random histories of a run, with a store that has only the decisions.

The laws: every sealed trajectory is in exactly one place. The same events give the same state, also
if each is repeated, or a planner resumes from a snapshot. No group waits for ever once its deadline
has fired.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeGuard

import pytest
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

from testkit import ZERO_VARIANCE, config, sealed
from testkit.folds import abandoned, died, opened, restored
from turnstream.batching.config import BatchingConfig, GroupFilter
from turnstream.batching.fold.decisions import (
    Decision,
    GroupCut,
    GroupDropped,
    MemberDropped,
    RefillWanted,
)
from turnstream.batching.fold.readiness import RunFold
from turnstream.types import (
    DeadlineFired,
    Event,
    RefillGranted,
    RewardPosted,
    Status,
    TrajectoryKey,
)

some = st.integers(0, 10**6)
"""Choice among any number of things."""

filters_of_runs = st.sampled_from(
    [(), ZERO_VARIANCE, (GroupFilter(kind="mean_range", metric="m", low=0.5),)]
)
masking_of_runs: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {},
        {"error_trajectories": "keep"},
        {"error_trajectories": "mask", "masked_reward": "leave_out"},
        {"mask_truncated": True, "masked_reward": "leave_out"},
        {"mask_truncated": True, "masked_reward": "keep"},
    ]
)
_UNMASKED: dict[str, Any] = {
    "error_trajectories": "drop",
    "mask_truncated": False,
    "masked_reward": "keep",
}


def is_event(entry: Event | BatchingConfig | frozenset[str]) -> TypeGuard[Event]:
    return not isinstance(entry, BatchingConfig | frozenset)


class _History(RuleBasedStateMachine):
    """Generators, the store and one planner; its decisions make the ledger."""

    def __init__(self) -> None:
        super().__init__()
        self.config = config()
        self.fold = RunFold(self.config)
        # Events, revised configs, and the groups of each plan.
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
        filters=filters_of_runs,
        masking=masking_of_runs,
        most_open=st.sampled_from([0, 3]),
        estimator=st.sampled_from(["grpo", "remax"]),
    )
    def begin(
        self,
        policy: Any,
        fallback: Any,
        surplus: Any,
        filters: Any,
        masking: Any,
        most_open: int,
        estimator: Any,
    ) -> None:
        self.config = replace(
            self.config,
            deadline_policy=policy,
            refill_fallback=fallback,
            max_refills=3 if policy == "refill" else 0,
            surplus=surplus,
            group_filters=filters,
            max_open_groups=most_open,
            estimator=estimator,
            group_deadline_s=1,
            reward_deadline_s=1,
            **masking,
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
        self.post(opened(num_samples, needed, group_id=group_id))

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
    @rule(
        number=some,
        reward=st.sampled_from([0.0, 1.0, None]),
        status=st.sampled_from(Status),
        metrics=st.sampled_from([{}, {"m": 0.0}, {"m": 1.0}]),
    )
    def seal(self, number: int, reward: float | None, status: Status, metrics: Any) -> None:
        key = self.pick(number, "open")
        self.ledger[key] = "sealed"
        attempt: Any = {"sample": key.sample, "attempt": key.attempt}
        self.post(sealed(key.group_id, **attempt, reward=reward, status=status, metrics=metrics))

    @precondition(lambda self: self.has("open"))
    @rule(number=some, status=st.sampled_from(Status))
    def seal_without_reward(self, number: int, status: Status) -> None:
        key = self.pick(number, "open")
        self.ledger[key] = "awaiting"
        attempt: Any = {"sample": key.sample, "attempt": key.attempt}
        event = sealed(key.group_id, **attempt, reward=None, status=status)
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
        self.post(abandoned(*key[1:], group_id=key.group_id))

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
        self.post(died(*key[1:], group_id=key.group_id))

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
        filters=filters_of_runs,
        masking=masking_of_runs,
        source=st.sampled_from(["outcome", "sum_of_turns"]),
        most_open=st.sampled_from([0, 3]),
        estimator=st.sampled_from(["grpo", "remax"]),
    )
    def revise(
        self,
        surplus: Any,
        filters: Any,
        masking: Any,
        source: Any,
        most_open: int,
        estimator: Any,
    ) -> None:
        self.config = replace(
            self.config,
            surplus=surplus,
            group_filters=filters,
            reward_source=source,
            max_open_groups=most_open,
            estimator=estimator,
            **{**_UNMASKED, **masking},
        )
        self.log.append(self.config)
        self.carry_out(self.fold.revise(f"{len(self.log)}-0", self.config))

    @rule()
    def restart_planner(self) -> None:
        self.fold, decisions = self.replayed()
        before = dict(self.ledger), dict(self.groups), set(self.refills), dict(self.deadlines)
        self.carry_out(decisions)
        assert before == (self.ledger, self.groups, self.refills, self.deadlines)

    # the laws

    def is_decided(self, group_id: str) -> bool:
        return group_id not in self.fold.state.undecided

    @invariant()
    def every_sealed_trajectory_is_in_one_place(self) -> None:
        ready = [member.key for group in self.fold.ready for member in group.members]
        assert len(ready) == len(set(ready))
        open_groups = self.fold.state.undecided
        for key, entry in self.ledger.items():
            if entry == "sealed":
                assert key in ready or key.group_id in open_groups
            else:
                assert key not in ready

    @invariant()
    def greedy_sample_is_ready_with_another_one(self) -> None:
        if self.config.estimator == "remax":
            for group in self.fold.ready:
                assert group.members[0].key.sample == 0
                assert len(group.members) > 1

    @invariant()
    def counted_groups_are_closed_once_decided(self) -> None:
        if self.config.max_open_groups and self.config.surplus == "drop":
            assert {self.groups[ready.group_id] for ready in self.fold.ready} <= {"decided"}

    @invariant()
    def finished_group_has_no_open_trajectory(self) -> None:
        for key, entry in self.ledger.items():
            if self.groups[key.group_id] not in {"open", "decided"}:
                assert entry not in {"open", "awaiting", "sealed"}

    @invariant()
    def open_group_has_something_to_wait_for(self) -> None:
        for group_id in self.fold.state.undecided:
            assert self.fold.state.groups[group_id].pending()
            has_attempt = any(
                key.group_id == group_id and entry in {"open", "awaiting"}
                for key, entry in self.ledger.items()
            )
            has_refill = any(key.group_id == group_id for key in self.refills)
            assert has_attempt or has_refill

    def teardown(self) -> None:
        fold, decisions = self.replayed()
        assert fold.ready == self.fold.ready
        for again, seen in (self.replayed(repeats=True), self.replayed(from_snapshots=True)):
            assert (again.state, seen) == (fold.state, decisions)

    def replayed(
        self, *, repeats: bool = False, from_snapshots: bool = False
    ) -> tuple[RunFold, list[Decision]]:
        """Return the fold of a successor, and its decisions.

        It may apply each event twice and an earlier one again, or resume from a snapshot each time.
        """
        fold, of = RunFold(self.first_config), self.first_config
        decisions: list[Decision] = []
        for i, entry in enumerate(self.log):
            if from_snapshots:
                fold = restored(fold, of)
            if isinstance(entry, frozenset):
                decisions += fold.take([g for g in fold.ready if g.group_id in entry])
            elif isinstance(entry, BatchingConfig):
                of = entry
                decisions += fold.revise(f"{i + 1}-0", entry)
            else:
                again = [i, i // 2] if repeats else []
                events = [(k, each) for k in (i, *again) if is_event(each := self.log[k])]
                decisions += [d for k, each in events for d in fold.apply(f"{k + 1}-0", each)]
        return fold, decisions


@pytest.mark.hypothesis
def test_fold_keeps_its_laws_through_a_random_history() -> None:
    run_state_machine_as_test(_History, settings=settings(stateful_step_count=60))
