"""Ready groups: a fold over the events of a run.

A group is *decided* by its first `num_needed` valid sealed members, by its deadline, or when no
other sample can become a member. With `masked_reward="leave_out"`, masked members count as needed
only in the last two cases. It is *ready* with two or more valid members, or with one where one is
needed; any other is dropped. The result depends on the order of events and on nothing else: no
clock, no arrival time. Applying an event again changes nothing. A withdrawn plan puts its groups
back (`turnstream.batching.fold.withdrawing`)::

    opened ──> enough members, or every sample ended ──> ready ──> taken (it is in a manifest)
      │ ▲                                        │         └────> incomplete, if members die first
      │ └─ refills, where the run allows them    ├──> incomplete   too few valid members
      │                                          └──> filtered     a group filter holds
      └──> deadline: ready with the members it has, or incomplete, or refills

An evaluation takes the same events. It needs all of its samples, has neither refills nor filters,
and ends with a result instead of a plan. Every consequence is returned as a decision, and all
decisions may be carried out twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace

from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.decisions import (
    Decision,
    GroupCut,
    GroupDropped,
    GroupEvaluated,
    ReadyGroup,
    RefillWanted,
    incomplete_member,
    surplus_member,
)
from turnstream.batching.fold.members import FoldState, GroupMembers, problem_of
from turnstream.batching.merge.plan import GroupPlan
from turnstream.batching.scoring.filters import is_compared
from turnstream.batching.scoring.group_filters import filter_reason
from turnstream.batching.scoring.rewards import with_posted_reward
from turnstream.errors import InvalidTurnError
from turnstream.types import (
    DeadlineFired,
    Event,
    GroupOpened,
    PlansWithdrawn,
    RefillGranted,
    RewardPosted,
    RunClosed,
    RunFinished,
    RunReopened,
    SealedTrajectory,
    TrajectoryAbandoned,
    TrajectoryDied,
    TrajectoryKey,
    TrajectoryState,
)

_DECIDED_BEFORE = "its group was decided before it was sealed"


class RunFold:
    """The groups of a run, as its events describe them, until they are planned or dropped.

    Attributes:
        state: its content, which events change. Encode it before the next event.
    """

    def __init__(self, config: BatchingConfig, state: FoldState | None = None) -> None:
        self.state = FoldState() if state is None else state
        self._config = config

    @property
    def ready(self) -> tuple[ReadyGroup, ...]:
        """Groups that can be planned, in order of completion."""
        pairs = zip(self.state.ready_groups, self.state.ready.values(), strict=True)
        return tuple([group.as_ready(completed_by=event_id) for group, event_id in pairs])

    @property
    def num_ready(self) -> int:
        """Number of groups that can be planned."""
        return len(self.state.ready)

    @property
    def num_open_groups(self) -> int:
        """Number of undecided groups, without evaluations."""
        groups = self.state.groups
        return sum(not groups[group_id].is_evaluation for group_id in self.state.undecided)

    @property
    def is_final(self) -> bool:
        """Whether the ready groups make the last, short batch of a closed run."""
        is_short = self.state.closed and self.state.leftover == "short"
        return is_short and not self.num_open_groups

    @property
    def is_finished(self) -> bool:
        """Whether the run is closed, and no batch follows."""
        most = 0 if self.state.leftover == "short" else self._config.batch_groups - 1
        return self.state.closed and self.num_ready <= most and not self.num_open_groups

    def still_holds(self, decision: Decision) -> bool:
        """Return whether a decision is to be carried out after all later events.

        Refills may have been granted, and a cut group may be open again. Drops are final.
        """
        match decision:
            case RefillWanted(key=key, number=number):
                group = self.state.groups.get(key.group_id)
                return group is not None and number in group.wanted
            case GroupCut(group_id=group_id):
                group = self.state.groups.get(group_id)
                return group is None or group.is_cut
            case _:
                return True

    def apply(self, event_id: str, event: Event) -> list[Decision]:
        """Apply the next event, or one that was applied before; return the decisions.

        A refused event raises BatchingError and changes nothing. Event ids ascend.
        """
        match event:
            case SealedTrajectory():
                return self._seal(event_id, event)
            case GroupOpened():
                self._open(event_id, event)
            case RewardPosted():
                return self._post_reward(event_id, event)
            case TrajectoryAbandoned(key=key) | TrajectoryDied(key=key):
                return self._lose(event_id, key)
            case DeadlineFired(awaited=TrajectoryKey() as key):
                return self._miss_reward(event_id, key)
            case DeadlineFired():
                return self._miss_deadline(event_id, event)
            case RefillGranted():
                return self._grant_refill(event)
            case _:
                return self._apply_to_run(event_id, event)
        return []

    def revise(self, event_id: str, config: BatchingConfig) -> list[Decision]:
        """Judge by another configuration from this event on; return the decisions.

        Decided groups stay decided, except members and groups that it cannot train at all.
        """
        if config == self._config:
            return []
        self._config = config
        groups = [each for each in self.state.groups.values() if not each.is_evaluation]
        decisions = [each for group in groups for each in self._review(event_id, group)]
        if config.max_open_groups and config.surplus == "drop":
            decisions += [each for group in self.state.ready_groups for each in self._cut(group)]
        return decisions

    def take(self, groups: Iterable[ReadyGroup | GroupPlan]) -> list[Decision]:
        """Remove groups that are in a manifest now; return their members that came too late."""
        decisions: list[Decision] = []
        for taken in groups:
            group = self.state.groups.get(taken.group_id)
            if group is not None and taken.group_id in self.state.ready:
                decisions += [surplus_member(key, _DECIDED_BEFORE) for key in group.awaiting]
            if group is not None:
                self._end(group)
        return decisions

    def remove_decided(self, group_ids: Iterable[str]) -> None:
        """Remove decided groups: the store accepts no more events of them."""
        for group_id in group_ids:
            self.state.decided.pop(group_id, None)

    # Events of one attempt.

    def _seal(self, event_id: str, event: SealedTrajectory) -> list[Decision]:
        key = event.key
        group = self.state.groups.get(key.group_id)
        seen = self.state.decided.get(key.group_id) if group is None else group.seen
        if seen is None:
            return [incomplete_member(key, "its group was never opened")]
        if key in seen:
            return []
        seen.add(key)
        if group is None:
            return [surplus_member(key, _DECIDED_BEFORE)]
        return self._place(event_id, event)

    def _place(self, event_id: str, sealed: SealedTrajectory) -> list[Decision]:
        """Make a sealed trajectory a member of its group, or drop it with a reason."""
        key = sealed.key
        group = self.state.groups[key.group_id]
        is_late = key.group_id in self.state.ready and self._config.surplus == "drop"
        surplus = _DECIDED_BEFORE if is_late else group.surplus_reason(key)
        if surplus:
            group.granted.discard(key)
            return [surplus_member(key, surplus)]
        problem = "" if group.is_evaluation else problem_of(sealed, self._config)
        if problem:
            dropped = incomplete_member(key, f"sample {key.sample} {problem}")
            return [dropped, *self._end_attempt(event_id, key)]
        if sealed.awaits_reward:
            group.awaiting[key] = sealed
            return []
        group.members[key.sample] = sealed
        group.granted.discard(key)
        if key.group_id in self.state.ready:
            self.state.ready[key.group_id] = event_id
            return []
        is_counted = is_compared(sealed, self._config)
        follow = self._decide_if_complete if is_counted else self._continue_without
        return follow(event_id, group)

    def _post_reward(self, event_id: str, event: RewardPosted) -> list[Decision]:
        sealed = self._pop_awaiting(event.key)
        return [] if sealed is None else self._place(event_id, with_posted_reward(sealed, event))

    def _miss_reward(self, event_id: str, key: TrajectoryKey) -> list[Decision]:
        """Continue without a late reward; an evaluation keeps the rest of the trajectory."""
        sealed = self._pop_awaiting(key)
        if sealed is None:
            return []
        group = self.state.groups[key.group_id]
        if group.is_evaluation:
            return self._place(event_id, replace(sealed, awaits_reward=False))
        dropped = incomplete_member(key, "no reward was posted before its deadline")
        group.end_attempt(key)
        if key.group_id in self.state.ready:
            return [dropped]
        num_possible = len(group.members) + len(group.pending())
        if self._config.deadline_policy == "drop" and num_possible < group.opened.num_needed:
            reason = f"no reward of sample {key.sample} was posted before its deadline"
            return [dropped, self._drop(group, TrajectoryState.INCOMPLETE, reason)]
        return [dropped, *self._continue_without(event_id, group)]

    def _lose(self, event_id: str, key: TrajectoryKey) -> list[Decision]:
        group = self.state.groups.get(key.group_id)
        if group is None or not group.is_sample(key.sample):
            return []
        if group.remove_member(key):
            return self._continue_without(event_id, group)
        if group.awaiting.pop(key, None) is None and key in group.seen:
            return []
        return self._end_attempt(event_id, key)

    def _end_attempt(self, event_id: str, key: TrajectoryKey) -> list[Decision]:
        """Continue without an attempt that is no member; a decided group does not change."""
        group = self.state.groups[key.group_id]
        group.end_attempt(key)
        return [] if key.group_id in self.state.ready else self._continue_without(event_id, group)

    def _pop_awaiting(self, key: TrajectoryKey) -> SealedTrajectory | None:
        group = self.state.groups.get(key.group_id)
        return None if group is None else group.awaiting.pop(key, None)

    def _grant_refill(self, event: RefillGranted) -> list[Decision]:
        group = self.state.groups.get(event.key.group_id)
        if group is None or event.number <= group.num_granted:
            return []
        group.num_granted = event.number
        if group.wanted.pop(event.number, None) is not None:
            group.granted.add(event.key)
        # It was granted before the group was cut, and opened it: to be cut again.
        return self._cut(group) if group.is_cut else []

    # Events of whole groups.

    def _apply_to_run(self, event_id: str, event: Event) -> list[Decision]:
        match event:
            case RunClosed(leftover=leftover):
                self.state.closed, self.state.leftover = True, leftover
            case RunReopened():
                self.state.closed = False
            case RunFinished() if self.state.closed and self.state.leftover == "drop":
                reason = "left over when the run was closed"
                ready = self.state.ready_groups
                return [self._drop(group, TrajectoryState.SURPLUS, reason) for group in ready]
            case PlansWithdrawn(dead=dead):
                return self._review_ready(event_id, {key.group_id for key in dead})
            case _:
                pass
        return []

    def _open(self, event_id: str, event: GroupOpened) -> None:
        if event.group_id in self.state.groups or event.group_id in self.state.decided:
            return
        if event.num_samples > self._config.max_samples:
            raise InvalidTurnError(
                "num_samples",
                f"group {event.group_id!r} has {event.num_samples} samples, above "
                f"max_samples={self._config.max_samples} of the run",
            )
        self.state.groups[event.group_id] = GroupMembers(event, event_id)

    def _miss_deadline(self, event_id: str, event: DeadlineFired) -> list[Decision]:
        group = self.state.groups.get(event.group_id)
        if group is None or event.group_id in self.state.ready:
            return []
        if group.is_evaluation:
            return [self._evaluate(group)]
        # A refill sets a new deadline; an earlier one that fired is repeated or obsolete.
        if not group.last_fired < event.num_refills == group.num_granted:
            return []
        group.last_fired = event.num_refills
        policy = self._config.deadline_policy
        if policy == "refill":
            asked = group.refill_overdue(self._config)
            if asked or group.wanted:
                return [*asked]
            policy = self._config.refill_fallback
        if policy == "train_short" or not group.is_short:
            return self._decide(event_id, group)
        reason = f"its deadline passed: {group.shortage()}"
        return [self._drop(group, TrajectoryState.INCOMPLETE, reason)]

    def _review(self, event_id: str, group: GroupMembers) -> list[Decision]:
        """Judge a group and its members by a new configuration."""
        is_ready = group.opened.group_id in self.state.ready
        attempts = group.ordered if is_ready else group.sealed
        dropped = group.remove_unfit(attempts, self._config)
        if dropped:
            return [*dropped, *self._continue_without(event_id, group)]
        is_lacking = bool(group.comparison_problem(self._config))
        is_due = is_lacking if is_ready else group.has_enough(self._config)
        return self._decide(event_id, group) if is_due else []

    def _review_ready(self, event_id: str, smaller: Set[str]) -> list[Decision]:
        """Judge groups that were put back, and those that have fewer members now."""
        decisions: list[Decision] = []
        for group in self.state.ready_groups:
            decisions += self._review(event_id, group)
            if group.opened.group_id in smaller & self.state.ready.keys():
                decisions += self._decide(event_id, group)
        return decisions

    # Decisions.

    def _continue_without(self, event_id: str, group: GroupMembers) -> list[Decision]:
        """Refill, continue with the others or end the group."""
        group_id = group.opened.group_id
        if self._config.deadline_policy == "refill" and not group.is_evaluation:
            asked = group.refill_lost(self._config)
            if asked:
                self.state.ready.pop(group_id, None)
                group.is_cut = False
                return [*asked]
        decide = self._decide if group_id in self.state.ready else self._decide_if_complete
        return decide(event_id, group)

    def _decide_if_complete(self, event_id: str, group: GroupMembers) -> list[Decision]:
        if group.is_evaluation:
            return [] if group.pending() else [self._evaluate(group)]
        if group.has_enough(self._config):
            return self._decide(event_id, group)
        if not group.has_all():
            return []
        policies = self._config.deadline_policy, self._config.refill_fallback
        if group.is_short and policies == ("refill", "drop"):
            return [self._drop(group, TrajectoryState.INCOMPLETE, group.shortage())]
        return self._decide(event_id, group)

    def _decide(self, event_id: str, group: GroupMembers) -> list[Decision]:
        """Train the group with the members that it has, if these are enough to compare."""
        if reason := group.comparison_problem(self._config):
            return [self._drop(group, TrajectoryState.INCOMPLETE, reason)]
        if reason := filter_reason(group.compared(self._config), self._config):
            return [self._drop(group, TrajectoryState.FILTERED, reason)]
        self.state.ready[group.opened.group_id] = event_id
        return self._cut(group) if self._config.surplus == "drop" else []

    def _cut(self, group: GroupMembers) -> list[Decision]:
        """Wait for no unsealed sample; notify the store if it may have the group open."""
        if group.has_more or group.num_granted or self._config.max_open_groups:
            return group.cut()
        return []

    def _drop(self, group: GroupMembers, state: TrajectoryState, reason: str) -> GroupDropped:
        self._end(group)
        return group.dropped(state, reason)

    def _evaluate(self, group: GroupMembers) -> GroupEvaluated:
        self._end(group)
        return self.state.evals.add(group.opened, group.ordered, self._config)

    def _end(self, group: GroupMembers) -> None:
        group_id = group.opened.group_id
        self.state.ready.pop(group_id, None)
        del self.state.groups[group_id]
        self.state.decided[group_id] = group.seen
