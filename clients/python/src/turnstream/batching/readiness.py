"""Which groups are ready to train: a fold over the events of a run.

A group is *complete* when each of its samples is sealed or ended (abandoned, or its payload dead).
A complete group of two or more valid members, or of one where only one was declared, is *ready*;
any other is dropped as incomplete. The result depends on the order of events and on nothing else:
no clock, no arrival time. Hearing an event again changes nothing.

    opened ──> every sample sealed or ended ──> ready ──> taken (it is in a manifest)
                                        │          └────> incomplete, if members die first
                                        ├──> incomplete   too few valid members
                                        └──> filtered     all rewards equal, if the run says so
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from turnstream.batching.config import BatchingConfig
from turnstream.batching.filters import has_zero_variance
from turnstream.batching.rewards import planned_reward, reward_problem
from turnstream.types import (
    Event,
    GroupOpened,
    RunClosed,
    SealedTrajectory,
    TrajectoryAbandoned,
    TrajectoryDied,
    TrajectoryKey,
    TrajectoryState,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyGroup:
    """A complete group with enough members to train.

    Attributes:
        members: the valid ones, in order of (sample, attempt).
        completed_by: id of the event that made the group what it is.
    """

    group_id: str
    prompt_uid: str
    members: tuple[SealedTrajectory, ...]
    completed_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDropped:
    """Sealed trajectories of a group, all or some, that will not be trained.

    Attributes:
        state: FILTERED or INCOMPLETE; SURPLUS for a member that came after the group was decided,
            or beside another of the same sample.
        reason: in words, for the ledger.
        keys: the trajectories that go into this state; empty if the group had none.
    """

    group_id: str
    state: TrajectoryState
    reason: str
    keys: tuple[TrajectoryKey, ...]


@dataclass(slots=True)
class _OpenGroup:
    """A group that is being filled: for every sample what became of it, None where it ended."""

    opened: GroupOpened
    samples: dict[int, SealedTrajectory | None] = field(
        default_factory=dict[int, SealedTrajectory | None]
    )
    seen: set[TrajectoryKey] = field(default_factory=set[TrajectoryKey])


class RunFold:
    """The groups of a run, as its events tell them.

    `ready` holds complete groups in order of completion, until they are taken.
    """

    def __init__(self, config: BatchingConfig) -> None:
        self._config = config
        self._open: dict[str, _OpenGroup] = {}
        self._ready: dict[str, ReadyGroup] = {}
        self._decided: dict[str, set[TrajectoryKey]] = {}
        self._closed = False

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
        """Groups that were opened and are not complete."""
        return len(self._open)

    @property
    def closed(self) -> bool:
        """Whether the run was closed: no group will be opened any more."""
        return self._closed

    def apply(self, event_id: str, event: Event) -> list[GroupDropped]:
        """Take the next event in; what it drops.

        Args:
            event_id: of the stream, ascending; becomes `completed_by` of what the event completes.
            event: the next one, or one that was applied before.
        """
        match event:
            case SealedTrajectory():
                return self._seal(event_id, event)
            case GroupOpened():
                return self._open_group(event_id, event)
            case TrajectoryAbandoned():
                return self._end(event_id, event.key)
            case TrajectoryDied():
                return self._die(event_id, event)
            case RunClosed():
                self._closed = True
            case _:
                pass
        return []

    def take(self, groups: Iterable[ReadyGroup]) -> None:
        """Forget groups that are in a manifest now: nothing that comes later changes them.

        Whoever folds the events again takes a manifest's groups after its last event, before any
        later one.
        """
        for group in groups:
            self._ready.pop(group.group_id, None)

    def _open_group(self, event_id: str, event: GroupOpened) -> list[GroupDropped]:
        if event.group_id in self._open or event.group_id in self._decided:
            return []
        self._open[event.group_id] = _OpenGroup(event)
        return self._decide_if_complete(event_id, event.group_id)

    def _seal(self, event_id: str, event: SealedTrajectory) -> list[GroupDropped]:
        key = event.key
        group = self._open.get(key.group_id)
        if group is None:
            return self._late(key)
        if key in group.seen:
            return []
        group.seen.add(key)
        if not 0 <= key.sample < group.opened.num_samples:
            return [_surplus(key, f"sample {key.sample} of {group.opened.num_samples}")]
        if group.samples.get(key.sample) is not None:
            return [_surplus(key, f"sample {key.sample} was sealed by another attempt before")]
        group.samples[key.sample] = event
        return self._decide_if_complete(event_id, key.group_id)

    def _late(self, key: TrajectoryKey) -> list[GroupDropped]:
        seen = self._decided.get(key.group_id)
        if seen is None:
            return [_dropped([key], TrajectoryState.INCOMPLETE, "its group was never opened")]
        if key in seen:
            return []
        seen.add(key)
        return [_surplus(key, "its group was decided before it was sealed")]

    def _end(self, event_id: str, key: TrajectoryKey) -> list[GroupDropped]:
        group = self._open.get(key.group_id)
        if group is None or not 0 <= key.sample < group.opened.num_samples or key in group.seen:
            return []
        group.samples.setdefault(key.sample, None)
        return self._decide_if_complete(event_id, key.group_id)

    def _die(self, event_id: str, event: TrajectoryDied) -> list[GroupDropped]:
        key = event.key
        ready = self._ready.get(key.group_id)
        if ready is not None:
            return self._shrink(event_id, ready, key)
        group = self._open.get(key.group_id)
        if group is None:
            return []
        sealed = group.samples.get(key.sample)
        if sealed is not None and sealed.key == key:
            group.samples[key.sample] = None
            return []
        drops = self._end(event_id, key)
        # Should its seal still be heard, it is dead all the same.
        group.seen.add(key)
        return drops

    def _shrink(self, event_id: str, ready: ReadyGroup, dead: TrajectoryKey) -> list[GroupDropped]:
        members = tuple(member for member in ready.members if member.key != dead)
        if len(members) == len(ready.members):
            return []
        changed = replace(ready, members=members, completed_by=event_id)
        drop = self._why_dropped(changed, needed=min(2, len(ready.members)))
        if drop is None:
            self._ready[ready.group_id] = changed
            return []
        del self._ready[ready.group_id]
        return [drop]

    def _decide_if_complete(self, event_id: str, group_id: str) -> list[GroupDropped]:
        group = self._open[group_id]
        num_samples = group.opened.num_samples
        if len(group.samples) < num_samples:
            return []
        del self._open[group_id]
        self._decided[group_id] = group.seen
        sealed = [member for _, member in sorted(group.samples.items()) if member is not None]
        problems = [(member.key, _problem(member, self._config)) for member in sealed]
        ready = ReadyGroup(
            group_id=group_id,
            prompt_uid=group.opened.prompt_uid,
            members=tuple(m for m, (_, why) in zip(sealed, problems, strict=True) if not why),
            completed_by=event_id,
        )
        drops = [_dropped([key], TrajectoryState.INCOMPLETE, why) for key, why in problems if why]
        drop = self._why_dropped(ready, needed=min(2, num_samples))
        if drop is None:
            self._ready[group_id] = ready
            return drops
        return [*drops, drop]

    def _why_dropped(self, group: ReadyGroup, *, needed: int) -> GroupDropped | None:
        keys = tuple(member.key for member in group.members)
        if len(keys) < max(needed, 1):
            reason = f"{len(keys)} valid members, and {max(needed, 1)} are needed to compare"
            return GroupDropped(
                group_id=group.group_id,
                state=TrajectoryState.INCOMPLETE,
                reason=reason,
                keys=keys,
            )
        if self._config.drop_zero_variance and _teaches_nothing(group, self._config):
            return _dropped(keys, TrajectoryState.FILTERED, "all rewards are equal")
        return None


def _problem(member: SealedTrajectory, config: BatchingConfig) -> str:
    problem = reward_problem(member, config) if member.turns else "has no turn"
    return f"sample {member.key.sample} {problem}" if problem else ""


def _teaches_nothing(group: ReadyGroup, config: BatchingConfig) -> bool:
    """Whether all rewards are equal, those of masked members included: they are in the baseline.

    A group with less than two members that train a token has too few to say so, and is kept.
    """
    num_live = sum(any(turn.num_trained_tokens for turn in m.turns) for m in group.members)
    if num_live < 2:
        return False
    if config.estimator != "gdpo":
        return has_zero_variance([planned_reward(member, config) for member in group.members])
    return all(
        has_zero_variance([member.reward_components[name] for member in group.members])
        for name, _ in config.component_weights
    )


def _surplus(key: TrajectoryKey, reason: str) -> GroupDropped:
    return _dropped([key], TrajectoryState.SURPLUS, reason)


def _dropped(keys: Iterable[TrajectoryKey], state: TrajectoryState, reason: str) -> GroupDropped:
    named = tuple(keys)
    return GroupDropped(group_id=named[0].group_id, state=state, reason=reason, keys=named)
