"""Evaluations: a fold over the same events as the training, which plans nothing.

A group that is opened to evaluate ends when each of its samples was sealed or has ended, or at its
deadline. It is never refilled, filtered or cut, and its result counts for the oldest version
that sampled any of it. The result depends on the order of events alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.decisions import Decision, GroupEvaluated, surplus_member
from turnstream.batching.fold.members import GroupMembers
from turnstream.batching.scoring.rewards import MAX_REWARD, trajectory_reward, with_posted_reward
from turnstream.batching.scoring.tag_statistics import sum_up
from turnstream.types import (
    DeadlineFired,
    EvalGroup,
    EvalResult,
    Event,
    GroupOpened,
    Purpose,
    RewardPosted,
    SealedTrajectory,
    Spread,
    TrajectoryAbandoned,
    TrajectoryDied,
    TrajectoryKey,
)

MAX_OPEN_RESULTS: Final = 64
"""Versions whose results may still grow; results of older ones are final, and not kept here."""

_UNKNOWN: Final = -1
_NOTHING_FINAL: Final = -2


@dataclass(slots=True)
class EvalFold:
    """The evaluations of a run, as its events describe them.

    Attributes:
        groups: groups that have not ended.
        decided: attempts with a recorded end, by finished group.
        results: outcome so far by version; -1 where it is unknown.
        last_final: newest version with a final result; -2 before the first.
    """

    groups: dict[str, GroupMembers] = field(default_factory=dict[str, GroupMembers])
    decided: dict[str, set[TrajectoryKey]] = field(default_factory=dict[str, set[TrajectoryKey]])
    results: dict[int, EvalResult] = field(default_factory=dict[int, EvalResult])
    last_final: int = _NOTHING_FINAL

    def apply(self, event_id: str, event: Event, config: BatchingConfig) -> list[Decision] | None:
        """Return the decisions after an event of an evaluation; None for other events."""
        if isinstance(event, GroupOpened):
            return self._open(event_id, event, config)
        group_id = _group_of(event)
        if group_id in self.decided:
            return self._come_late(event)
        group = self.groups.get(group_id)
        if group is None:
            return None
        match event:
            case SealedTrajectory():
                dropped = self._seal(group, event)
            case RewardPosted():
                dropped = self._post_reward(group, event)
            case DeadlineFired(awaited=TrajectoryKey() as key):
                dropped = self._miss_reward(group, key)
            case TrajectoryAbandoned(key=key) | TrajectoryDied(key=key):
                dropped = self._lose(group, key)
            case _:
                return self._end(group, config)
        return [*dropped, *([] if group.pending() else self._end(group, config))]

    def forget(self, group_ids: Iterable[str]) -> None:
        """Forget groups of which nothing can come any more."""
        for group_id in group_ids:
            self.decided.pop(group_id, None)

    def _open(
        self, event_id: str, event: GroupOpened, config: BatchingConfig
    ) -> list[Decision] | None:
        if event.purpose is not Purpose.EVAL:
            return None
        if event.group_id not in self.groups and event.group_id not in self.decided:
            self.groups[event.group_id] = GroupMembers.of_new_group(event, event_id, config)
        return []

    def _come_late(self, event: Event) -> list[Decision]:
        if not isinstance(event, SealedTrajectory):
            return []
        seen = self.decided[event.key.group_id]
        if event.key in seen:
            return []
        seen.add(event.key)
        return [surplus_member(event.key, "its evaluation had ended before it was sealed")]

    def _seal(self, group: GroupMembers, sealed: SealedTrajectory) -> list[Decision]:
        key = sealed.key
        if key in group.seen:
            return []
        group.seen.add(key)
        if not group.is_sample(key.sample):
            return [surplus_member(key, f"sample {key.sample} of {group.opened.num_samples}")]
        if sealed.awaits_reward:
            group.awaiting[key] = sealed
            return []
        return self._place(group, sealed)

    def _place(self, group: GroupMembers, sealed: SealedTrajectory) -> list[Decision]:
        key = sealed.key
        if key.sample in group.members:
            return [
                surplus_member(key, f"sample {key.sample} was sealed by another attempt before")
            ]
        group.members[key.sample] = sealed
        return []

    def _post_reward(self, group: GroupMembers, event: RewardPosted) -> list[Decision]:
        sealed = group.awaiting.pop(event.key, None)
        if sealed is None:
            return []
        return self._place(group, with_posted_reward(sealed, event))

    def _miss_reward(self, group: GroupMembers, key: TrajectoryKey) -> list[Decision]:
        """Continue without a reward; all other values of the trajectory count."""
        sealed = group.awaiting.pop(key, None)
        return [] if sealed is None else self._place(group, sealed)

    def _lose(self, group: GroupMembers, key: TrajectoryKey) -> list[Decision]:
        if group.is_sample(key.sample):
            group.remove(key)
        return []

    def _end(self, group: GroupMembers, config: BatchingConfig) -> list[Decision]:
        opened = group.opened
        del self.groups[opened.group_id]
        self.decided[opened.group_id] = group.seen
        members = group.ordered
        rewards = [eval_reward(member, config) for member in members]
        result = group_result(opened, members, rewards) if members else None
        return [
            GroupEvaluated(
                group_id=opened.group_id,
                keys=tuple(member.key for member in members),
                result=result,
                total=None if result is None else self._add(result, members, rewards),
            )
        ]

    def _add(
        self,
        result: EvalGroup,
        members: Sequence[SealedTrajectory],
        rewards: Sequence[float | None],
    ) -> EvalResult | None:
        """The result of the version with this group; None where it is final without it."""
        version = _UNKNOWN if result.version is None else result.version
        if version <= self.last_final:
            return None
        known = self.results.get(version) or EvalResult(version=result.version)
        reward = known.reward
        for number in _given(rewards):
            reward = reward.with_number(number)
        total = replace(
            known,
            num_groups=known.num_groups + 1,
            num_trajectories=known.num_trajectories + result.num_trajectories,
            num_lost=known.num_lost + result.num_lost,
            reward=reward,
            best=known.best if result.best is None else known.best.with_number(result.best),
            figures=sum_up(zip(members, rewards, strict=True), onto=known.figures),
        )
        self.results[version] = total
        if len(self.results) > MAX_OPEN_RESULTS:
            self.last_final = min(self.results)
            del self.results[self.last_final]
        return total


def eval_reward(sealed: SealedTrajectory, config: BatchingConfig) -> float | None:
    """The reward by the run's source, without penalties of length; None where there is none.

    Where the run compares components it is their weighted sum, or the outcome if one is missing.
    """
    components = sealed.reward_components
    if config.estimator == "gdpo" and all(n in components for n, _ in config.component_weights):
        reward = sum(weight * components[name] for name, weight in config.component_weights)
    elif config.estimator == "gdpo":
        reward = sealed.reward
    else:
        reward = trajectory_reward(sealed, source=config.reward_source)
    return reward if reward is not None and abs(reward) <= MAX_REWARD else None


def group_result(
    opened: GroupOpened, members: Sequence[SealedTrajectory], rewards: Sequence[float | None]
) -> EvalGroup:
    """Return the outcome of one group, from its members and the reward of each."""
    reward = Spread()
    for number in _given(rewards):
        reward = reward.with_number(number)
    return EvalGroup(
        group_id=opened.group_id,
        prompt_uid=opened.prompt_uid,
        version=min(
            (m.oldest_version for m in members if m.oldest_version is not None), default=None
        ),
        num_trajectories=len(members),
        num_lost=opened.num_samples - len(members),
        reward=reward,
        best=max(_given(rewards), default=None),
    )


def _given(rewards: Sequence[float | None]) -> list[float]:
    return [reward for reward in rewards if reward is not None]


def _group_of(event: Event) -> str:
    match event:
        case DeadlineFired(group_id=group_id):
            return group_id
        case (
            SealedTrajectory(key=key)
            | RewardPosted(key=key)
            | TrajectoryAbandoned(key=key)
            | TrajectoryDied(key=key)
        ):
            return key.group_id
        case _:
            return ""
