"""The groups of a run that are open or ready, and the decision on each.

Events of single attempts are applied by `turnstream.batching.fold.readiness`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.decisions import (
    Decision,
    GroupCut,
    GroupDropped,
    ReadyGroup,
    WaitingGroup,
    surplus_member,
)
from turnstream.batching.fold.evals import EvalFold
from turnstream.batching.fold.members import GroupMembers
from turnstream.batching.fold.withdrawing import WithdrawnGroup
from turnstream.batching.scoring.advantages import gigpo
from turnstream.batching.scoring.filters import (
    ZERO_VARIANCE_TOLERANCE,
    has_zero_variance,
    is_compared,
    is_masked,
    length_problem,
)
from turnstream.batching.scoring.rewards import planned_reward, planned_turn_rewards, reward_problem
from turnstream.types import (
    DeadlineFired,
    GroupOpened,
    Leftover,
    SealedTrajectory,
    TrajectoryKey,
    TrajectoryState,
)

_NO_MORE_REFILLS: Final = 1 << 30
"""Refills that a group which was planned counts as having had: its prompt may be gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldState:
    """Content of a `RunFold`, by the names under which a snapshot stores it.

    Attributes:
        groups: open and ready groups, oldest first.
        ready: decided groups that no plan has taken, in order of completion.
        decided: attempts that the fold has seen of each finished group.
        evals: evaluations of the run.
        closed: whether the run takes no new group.
        leftover: fate of the groups that make no whole batch of a closed run.
    """

    groups: dict[str, GroupMembers] = field(default_factory=dict[str, GroupMembers])
    ready: dict[str, ReadyGroup] = field(default_factory=dict[str, ReadyGroup])
    decided: dict[str, set[TrajectoryKey]] = field(default_factory=dict[str, set[TrajectoryKey]])
    evals: EvalFold = field(default_factory=EvalFold)
    closed: bool = False
    leftover: Leftover = "short"


class OpenGroups:
    """Groups from their opening until they are taken or dropped.

    `ready` holds decided groups in order of completion, until they are taken.
    """

    def __init__(self, config: BatchingConfig, state: FoldState) -> None:
        self._config = config
        self._groups = state.groups
        self._ready = state.ready
        self._decided = state.decided

    @property
    def ready(self) -> tuple[ReadyGroup, ...]:
        """Groups that can be planned, in order of completion."""
        return tuple(self._ready.values())

    @property
    def num_ready(self) -> int:
        """How many groups can be planned."""
        return len(self._ready)

    @property
    def num_open_groups(self) -> int:
        """Groups that were opened and are not decided."""
        return len(self._groups) - len(self._ready)

    def waiting(self) -> Iterator[WaitingGroup]:
        """The undecided groups, oldest first."""
        for group_id, group in self._groups.items():
            if group_id not in self._ready:
                yield WaitingGroup(
                    group_id=group_id,
                    opened_by=group.opened_by,
                    num_members=len(group.members),
                    num_needed=group.opened.num_needed,
                    samples=tuple(group.pending()),
                    awaiting=tuple(group.awaiting),
                    num_refills=group.num_asked,
                )

    def openings(self) -> Iterator[tuple[str, str]]:
        """(group, id of the event that opened it) of all that are open or ready, oldest first."""
        for group_id, group in self._groups.items():
            yield group_id, group.opened_by

    def put_back(self, groups: Iterable[WithdrawnGroup]) -> None:
        """Put back groups whose plan is withdrawn, before all others.

        A fold that shares this state stays as it is. No sample joins these groups, and no refill
        replaces a dead member. PlansWithdrawn judges groups with fewer members than planned again.
        """
        members: dict[str, GroupMembers] = {}
        ready: dict[str, ReadyGroup] = {}
        for group in groups:
            seen = self._decided.get(group.group_id, set[TrajectoryKey]())
            members[group.group_id] = _members_of(group, seen)
            ready[group.group_id] = ReadyGroup(
                group_id=group.group_id,
                prompt_uid=group.prompt_uid,
                members=group.members,
                completed_by=group.completed_by,
                opened_by=group.opened_by,
            )
        self._decided = {name: seen for name, seen in self._decided.items() if name not in members}
        self._groups = {**members, **self._groups}
        self._ready = {**ready, **self._ready}

    def _go_on_without(self, event_id: str, group: GroupMembers) -> list[Decision]:
        """Refill, continue with the others or end the group after an attempt that is no member."""
        group_id = group.opened.group_id
        ready = self._ready.get(group_id)
        if ready is not None and len(group.members) == len(ready.members):
            return []
        asked = self._refill_lost(group)
        if ready is None:
            return asked or self._decide_if_complete(event_id, group)
        if asked:
            del self._ready[group_id]
            group.is_cut = False
            return asked
        return self._decide(event_id, group)

    def _refill_lost(self, group: GroupMembers) -> list[Decision]:
        if self._config.deadline_policy != "refill":
            return []
        return [*group.refill_lost(max_refills=self._config.max_refills)]

    def _decide_if_complete(self, event_id: str, group: GroupMembers) -> list[Decision]:
        if group.has_enough:
            return self._decide(event_id, group)
        if not group.ended or group.pending():
            return []
        if self._config.deadline_policy == "refill" and self._config.refill_fallback == "drop":
            return [self._drop(group, TrajectoryState.INCOMPLETE, _shortage(group))]
        return self._decide(event_id, group)

    def _miss_deadline(self, event_id: str, event: DeadlineFired) -> list[Decision]:
        group = self._groups.get(event.group_id)
        if group is None or event.group_id in self._ready:
            return []
        # A refill sets a new deadline; an earlier one that fired is repeated or obsolete.
        if not group.last_fired < event.num_refills == group.num_granted:
            return []
        group.last_fired = event.num_refills
        policy = self._config.deadline_policy
        if policy == "refill":
            asked = group.refill_overdue(max_refills=self._config.max_refills)
            if asked or group.wanted:
                return [*asked]
            policy = self._config.refill_fallback
        if policy == "train_short":
            return self._decide(event_id, group)
        reason = f"its deadline passed: {_shortage(group)}"
        return [self._drop(group, TrajectoryState.INCOMPLETE, reason)]

    def _decide(self, event_id: str, group: GroupMembers) -> list[Decision]:
        """Train the group with the members that it has, if these are enough to compare."""
        compared = [member for member in group.ordered if is_compared(member, self._config)]
        if len(compared) < group.least:
            reason = f"{len(compared)} valid members, and {group.least} are needed to compare"
            return [self._drop(group, TrajectoryState.INCOMPLETE, reason)]
        if self._config.drop_zero_variance and teaches_nothing(compared, self._config):
            return [self._drop(group, TrajectoryState.FILTERED, "all rewards are equal")]
        self._set_ready(event_id, group)
        return self._cut(group) if self._config.surplus == "drop" else []

    def _set_ready(self, event_id: str, group: GroupMembers) -> None:
        self._ready[group.opened.group_id] = ReadyGroup(
            group_id=group.opened.group_id,
            prompt_uid=group.opened.prompt_uid,
            members=group.ordered,
            completed_by=event_id,
            opened_by=group.opened_by,
        )

    def _cut(self, group: GroupMembers) -> list[Decision]:
        """Continue without all unsealed samples, which are surplus from now on.

        The store is notified where `max_open_groups` is set, or a refill had opened the group
        again.
        """
        has_more = group.pending() or group.awaiting or group.wanted or group.granted
        if not has_more and not group.num_granted and not self._config.max_open_groups:
            return []
        reason = f"its group was decided by {len(group.members)} of {group.opened.num_samples}"
        decisions: list[Decision] = [surplus_member(key, reason) for key in group.awaiting]
        group.end_all()
        group.is_cut = True
        cut = GroupCut(group_id=group.opened.group_id, reason=reason, num_granted=group.num_granted)
        return [*decisions, cut]

    def _drop(self, group: GroupMembers, state: TrajectoryState, reason: str) -> GroupDropped:
        keys = (*(member.key for member in group.ordered), *group.awaiting)
        self._ready.pop(group.opened.group_id, None)
        self._forget(group)
        return GroupDropped(
            group_id=group.opened.group_id, state=state, reason=reason, keys=tuple(sorted(keys))
        )

    def _forget(self, group: GroupMembers) -> None:
        group_id = group.opened.group_id
        del self._groups[group_id]
        self._decided[group_id] = group.seen


def _members_of(group: WithdrawnGroup, seen: set[TrajectoryKey]) -> GroupMembers:
    """A group that was planned, with the members that it has left; all other samples have ended."""
    num_samples = 1 + max(key.sample for key in group.planned)
    opened = GroupOpened(
        group_id=group.group_id,
        prompt_uid=group.prompt_uid,
        num_samples=num_samples,
        num_needed=len(group.planned),
    )
    members = {member.key.sample: member for member in group.members}
    return GroupMembers(
        opened,
        group.opened_by,
        members=members,
        ended=set(range(num_samples)) - members.keys(),
        num_asked=_NO_MORE_REFILLS,
        seen=seen | {*group.planned},
    )


def _shortage(group: GroupMembers) -> str:
    """Return the missing part, as "2 of 4 members after 1 refills, none of sample 1, 3"."""
    opened = group.opened
    lacking = ", ".join(str(s) for s in range(opened.num_samples) if s not in group.members)
    refills = f" after {group.num_asked} refills" if group.num_asked else ""
    return f"{len(group.members)} of {opened.num_needed} members{refills}, none of sample {lacking}"


def problem_of(sealed: SealedTrajectory, config: BatchingConfig) -> str:
    """Return why a sealed trajectory can be no member of its group; empty if it can."""
    if not sealed.turns:
        return "has no turn"
    return reward_problem(sealed, config) or length_problem(sealed, config)


def teaches_nothing(compared: Sequence[SealedTrajectory], config: BatchingConfig) -> bool:
    """Return whether all compared rewards are equal; with gigpo also those of turns of one state.

    A group with less than two members that train a token is kept: it has too few to decide.
    """
    num_live = sum(_is_live(member, config) for member in compared)
    if num_live < 2:
        return False
    if config.estimator != "gdpo":
        rewards = [planned_reward(member, config) for member in compared]
        return has_zero_variance(rewards) and not _turns_differ(compared, config)
    return all(
        has_zero_variance([member.reward_components[name] for member in compared])
        for name, _ in config.component_weights
    )


def _turns_differ(compared: Sequence[SealedTrajectory], config: BatchingConfig) -> bool:
    if config.estimator != "gigpo" or not config.turn_weight:
        return False
    deviations = gigpo(
        np.zeros(len(compared)),
        turn_rewards=[np.array(planned_turn_rewards(member, config)) for member in compared],
        anchors=[member.anchors for member in compared],
        gamma=config.turn_discount,
        divide_by_std=False,
    )
    return any(np.abs(own).max() > ZERO_VARIANCE_TOLERANCE for own in deviations)


def _is_live(member: SealedTrajectory, config: BatchingConfig) -> bool:
    """Whether it trains a token."""
    return not is_masked(member, config) and any(turn.num_trained_tokens for turn in member.turns)
