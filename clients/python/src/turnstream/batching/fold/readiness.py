"""Ready groups: a fold over the events of a run.

A group is *decided* by its first `num_needed` valid sealed members, by its deadline, or when no
other sample can become a member. It is *ready* with two or more valid members, or with one where
one is needed; any other is dropped. The result depends on the order of events and on nothing else:
no clock, no arrival time. Applying an event again changes nothing. A withdrawn plan puts its groups
back (see `OpenGroups.put_back`)::

    opened ──> enough members, or every sample ended ──> ready ──> taken (it is in a manifest)
      │ ▲                                        │         └────> incomplete, if members die first
      │ └─ refills, where the run allows them    ├──> incomplete   too few valid members
      │                                          └──> filtered     all rewards equal, if so said
      └──> deadline: ready with the members it has, or incomplete, or refills

Every consequence is returned as a decision, and all decisions may be carried out twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.decisions import (
    Decision,
    GroupCut,
    GroupDropped,
    ReadyGroup,
    RefillWanted,
    incomplete_member,
    surplus_member,
)
from turnstream.batching.fold.members import GroupMembers
from turnstream.batching.fold.open_groups import FoldState, OpenGroups, problem_of
from turnstream.batching.scoring.filters import is_compared
from turnstream.batching.scoring.rewards import with_posted_reward
from turnstream.types import (
    DeadlineFired,
    Event,
    GroupOpened,
    Leftover,
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


class RunFold(OpenGroups):
    """The groups of a run, as its events describe them; `state` is shared with the caller."""

    def __init__(self, config: BatchingConfig, state: FoldState | None = None) -> None:
        state = FoldState() if state is None else state
        super().__init__(config, state)
        self._evals = state.evals
        self._closed = state.closed
        self._leftover: Leftover = state.leftover

    @property
    def closed(self) -> bool:
        """Whether the run was closed: no group will be opened any more."""
        return self._closed

    @property
    def is_final(self) -> bool:
        """Whether what is ready makes the last, short batch of a closed run."""
        return self._closed and self._leftover == "short" and not self.num_open_groups

    @property
    def is_finished(self) -> bool:
        """Whether the run is closed, and no batch follows."""
        most = 0 if self._leftover == "short" else self._config.batch_groups - 1
        return self._closed and not self.num_open_groups and self.num_ready <= most

    @property
    def evaluating(self) -> tuple[str, ...]:
        """The evaluations that have not ended, oldest first; no plan waits for them."""
        return tuple(self._evals.groups)

    def openings(self) -> Iterator[tuple[str, str]]:
        """(group, id of the event that opened it) of all that are open, ready or evaluating."""
        yield from super().openings()
        for group_id, group in self._evals.groups.items():
            yield group_id, group.opened_by

    def still_holds(self, decision: Decision) -> bool:
        """Return whether a decision is to be carried out after all later events.

        Refills may have been granted, and a cut group may be open again. Drops are final.
        """
        match decision:
            case RefillWanted(key=key, number=number):
                group = self._groups.get(key.group_id)
                return group is not None and number in group.wanted
            case GroupCut(group_id=group_id):
                group = self._groups.get(group_id)
                return group is None or group.is_cut
            case _:
                return True

    def apply(self, event_id: str, event: Event) -> list[Decision]:
        """Apply the next event, or one that was applied before; return the decisions.

        A refused event raises BatchingError and changes nothing. Event ids ascend.
        """
        of_evals = self._evals.apply(event_id, event, self._config)
        if of_evals is not None:
            return of_evals
        match event:
            case SealedTrajectory():
                return self._seal(event_id, event)
            case GroupOpened():
                return self._open_group(event_id, event)
            case RewardPosted():
                return self._post_reward(event_id, event)
            case TrajectoryAbandoned():
                return self._abandon(event_id, event.key)
            case TrajectoryDied():
                return self._die(event_id, event.key)
            case _:
                return self._apply_rare(event_id, event)

    def revise(self, event_id: str, config: BatchingConfig) -> list[Decision]:
        """Judge by another configuration from this event on; return the decisions.

        Decided groups stay decided, except members and groups that it cannot train at all.
        """
        if config == self._config:
            return []
        self._config = config
        decisions = [e for group in [*self._groups.values()] for e in self._again(event_id, group)]
        if config.max_open_groups and config.surplus == "drop":
            decisions += [each for name in self._ready for each in self._cut(self._groups[name])]
        return decisions

    def take(self, groups: Iterable[ReadyGroup]) -> list[Decision]:
        """Remove groups that are in a manifest now; return their members that came too late."""
        decisions: list[Decision] = []
        for group in groups:
            if self._ready.pop(group.group_id, None) is not None:
                members = self._groups[group.group_id]
                decisions += [surplus_member(key, _DECIDED_BEFORE) for key in members.awaiting]
                self._forget(members)
        return decisions

    def snapshot(self) -> FoldState:
        """Return the content of the fold. No copy: encode it before the next event."""
        return FoldState(
            groups=self._groups,
            ready=self._ready,
            decided=self._decided,
            evals=self._evals,
            closed=self._closed,
            leftover=self._leftover,
        )

    @property
    def decided(self) -> tuple[str, ...]:
        """Groups that are kept only to recognize late events."""
        return (*self._decided, *self._evals.decided)

    def pass_over(self, group_ids: Iterable[str]) -> None:
        """Remove planned groups that are still open here: some of their events were rejected."""
        for group_id in group_ids:
            members = self._groups.get(group_id)
            if members is not None:
                self._ready.pop(group_id, None)
                self._forget(members)

    def forget(self, group_ids: Iterable[str]) -> None:
        """Remove decided groups: the store accepts no more events of them."""
        names = tuple(group_ids)
        for group_id in names:
            self._decided.pop(group_id, None)
        self._evals.forget(names)

    def _apply_rare(self, event_id: str, event: Event) -> list[Decision]:
        match event:
            case DeadlineFired(awaited=TrajectoryKey() as key):
                return self._miss_reward(event_id, key)
            case DeadlineFired():
                return self._miss_deadline(event_id, event)
            case RefillGranted():
                return self._note_refill(event)
            case RunClosed(leftover=leftover):
                self._closed, self._leftover = True, leftover
            case RunReopened():
                self._closed = False
            case RunFinished() if self._closed and self._leftover == "drop":
                return [self._drop_leftover(group_id) for group_id in [*self._ready]]
            case PlansWithdrawn(dead=dead):
                return self._judge_again(event_id, {key.group_id for key in dead})
            case _:
                pass
        return []

    # Events of one attempt.

    def _open_group(self, event_id: str, event: GroupOpened) -> list[Decision]:
        if event.group_id not in self._groups and event.group_id not in self._decided:
            members = GroupMembers.of_new_group(event, event_id, self._config)
            self._groups[event.group_id] = members
        return []

    def _seal(self, event_id: str, event: SealedTrajectory) -> list[Decision]:
        key = event.key
        group = self._groups.get(key.group_id)
        if group is None:
            return self._late(key)
        if key in group.seen:
            return []
        group.seen.add(key)
        return self._place(event_id, group, event)

    def _late(self, key: TrajectoryKey) -> list[Decision]:
        seen = self._decided.get(key.group_id)
        if seen is None:
            return [incomplete_member(key, "its group was never opened")]
        if key in seen:
            return []
        seen.add(key)
        return [surplus_member(key, _DECIDED_BEFORE)]

    def _place(
        self, event_id: str, group: GroupMembers, sealed: SealedTrajectory
    ) -> list[Decision]:
        """Find out what a sealed trajectory is to its group: a member, surplus, or no use."""
        key = sealed.key
        surplus = self._why_surplus(group, key)
        if surplus:
            group.granted.discard(key)
            return [surplus_member(key, surplus)]
        if sealed.awaits_reward:
            group.awaiting[key] = sealed
            return []
        problem = problem_of(sealed, self._config)
        if problem:
            group.lose(key)
            dropped = incomplete_member(key, f"sample {key.sample} {problem}")
            return [dropped, *self._go_on_without(event_id, group)]
        group.members[key.sample] = sealed
        group.granted.discard(key)
        if key.group_id in self._ready:
            self._set_ready(event_id, group)
            return []
        return self._decide_if_complete(event_id, group)

    def _why_surplus(self, group: GroupMembers, key: TrajectoryKey) -> str:
        if key.group_id in self._ready and self._config.surplus == "drop":
            return _DECIDED_BEFORE
        if not group.is_sample(key.sample):
            return f"sample {key.sample} of {group.opened.num_samples}"
        if key.sample in group.members:
            return f"sample {key.sample} was sealed by another attempt before"
        return ""

    def _post_reward(self, event_id: str, event: RewardPosted) -> list[Decision]:
        group = self._groups.get(event.key.group_id)
        sealed = group.awaiting.pop(event.key, None) if group else None
        if group is None or sealed is None:
            return []
        return self._place(event_id, group, with_posted_reward(sealed, event))

    def _miss_reward(self, event_id: str, key: TrajectoryKey) -> list[Decision]:
        group = self._groups.get(key.group_id)
        if group is None or group.awaiting.pop(key, None) is None:
            return []
        group.lose(key)
        dropped = incomplete_member(key, "no reward was posted before its deadline")
        num_possible = len(group.members) + len(group.pending())
        if (
            key.group_id not in self._ready
            and self._config.deadline_policy == "drop"
            and num_possible < group.opened.num_needed
        ):
            reason = f"no reward of sample {key.sample} was posted before its deadline"
            return [dropped, self._drop(group, TrajectoryState.INCOMPLETE, reason)]
        return [dropped, *self._go_on_without(event_id, group)]

    def _abandon(self, event_id: str, key: TrajectoryKey) -> list[Decision]:
        group = self._groups.get(key.group_id)
        if group is None or not group.is_sample(key.sample) or key in group.seen:
            return []
        group.lose(key)
        return self._go_on_without(event_id, group)

    def _die(self, event_id: str, key: TrajectoryKey) -> list[Decision]:
        group = self._groups.get(key.group_id)
        if group is None or not group.is_sample(key.sample) or not group.remove(key):
            return []
        return self._go_on_without(event_id, group)

    def _note_refill(self, event: RefillGranted) -> list[Decision]:
        group = self._groups.get(event.key.group_id)
        if group is None or event.number <= group.num_granted:
            return []
        group.num_granted = event.number
        if group.wanted.pop(event.number, None) is not None:
            group.granted.add(event.key)
        # It was granted before the group was cut, and opened it: to be cut again.
        return self._cut(group) if group.is_cut else []

    # Events of whole groups.

    def _again(self, event_id: str, group: GroupMembers) -> list[Decision]:
        """Judge a group and its members by a new configuration."""
        lost = [(m.key, problem_of(m, self._config)) for m in group.ordered]
        lost = [(key, problem) for key, problem in lost if problem]
        for key, _ in lost:
            del group.members[key.sample]
            group.lose(key)
        if lost:
            dropped = [
                incomplete_member(key, f"sample {key.sample} {problem}") for key, problem in lost
            ]
            return [*dropped, *self._go_on_without(event_id, group)]
        is_short = sum(is_compared(m, self._config) for m in group.ordered) < group.least
        if group.opened.group_id in self._ready and is_short:
            return self._decide(event_id, group)
        return []

    def _judge_again(self, event_id: str, smaller: Set[str]) -> list[Decision]:
        """Judge groups that were put back, and those that have fewer members now."""
        decisions: list[Decision] = []
        for group_id in [*self._ready]:
            group = self._groups[group_id]
            decisions += self._again(event_id, group)
            if group_id in smaller and group_id in self._ready:
                decisions += self._decide(event_id, group)
        return decisions

    def _drop_leftover(self, group_id: str) -> GroupDropped:
        reason = "left over when the run was closed"
        return self._drop(self._groups[group_id], TrajectoryState.SURPLUS, reason)
