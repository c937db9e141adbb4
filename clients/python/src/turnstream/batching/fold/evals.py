"""Results of evaluations: groups that are folded like those of the training, and never planned.

An evaluation ends when each of its samples was sealed or has ended, or at its deadline. Its result
counts for the oldest version that sampled any of it. The result depends on the order of events
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.decisions import GroupEvaluated
from turnstream.batching.scoring.rewards import MAX_REWARD, trajectory_reward
from turnstream.batching.scoring.tag_statistics import sum_up
from turnstream.types import EvalGroup, EvalResult, GroupOpened, SealedTrajectory, Spread, Status

MAX_OPEN_RESULTS: Final = 64
"""Versions whose results may still grow; results of older ones are final, and not kept here."""

_UNKNOWN: Final = -1
_NOTHING_FINAL: Final = -2


@dataclass(slots=True)
class EvalResults:
    """Results of the versions of a run.

    Attributes:
        results: outcome so far by version; -1 where it is unknown.
        last_final: newest version with a final result; -2 before the first.
    """

    results: dict[int, EvalResult] = field(default_factory=dict[int, EvalResult])
    last_final: int = _NOTHING_FINAL

    def add(
        self, opened: GroupOpened, members: Sequence[SealedTrajectory], config: BatchingConfig
    ) -> GroupEvaluated:
        """Return the decision on a group that has ended with these members; count its result."""
        rewards = [eval_reward(member, config) for member in members]
        known = [reward for reward in rewards if reward is not None]
        result = group_result(opened, members, known) if members else None
        return GroupEvaluated(
            group_id=opened.group_id,
            keys=tuple(member.key for member in members),
            result=result,
            total=None if result is None else self._total(result, members, rewards),
        )

    def _total(
        self,
        result: EvalGroup,
        members: Sequence[SealedTrajectory],
        rewards: Sequence[float | None],
    ) -> EvalResult | None:
        """Return the result of the version with this group; None where it is final without it."""
        version = _UNKNOWN if result.version is None else result.version
        if version <= self.last_final:
            return None
        known = self.results.get(version) or EvalResult(version=result.version)
        total = replace(
            known,
            num_groups=known.num_groups + 1,
            num_trajectories=known.num_trajectories + result.num_trajectories,
            num_lost=known.num_lost + result.num_lost,
            reward=known.reward.with_numbers([each for each in rewards if each is not None]),
            best=known.best if result.best is None else known.best.with_numbers([result.best]),
            figures=sum_up(zip(members, rewards, strict=True), onto=known.figures),
        )
        self.results[version] = total
        if len(self.results) > MAX_OPEN_RESULTS:
            self.last_final = min(self.results)
            del self.results[self.last_final]
        return total


def eval_reward(sealed: SealedTrajectory, config: BatchingConfig) -> float | None:
    """Return the reward by the run's source, without penalties of length; None if there is none.

    Where the run compares components it is their weighted sum, or the outcome if one is missing. A
    failed trajectory without a reward counts with 0: without it, failures would raise the mean.
    """
    components = sealed.reward_components
    if config.estimator == "gdpo" and all(n in components for n, _ in config.component_weights):
        reward = sum(weight * components[name] for name, weight in config.component_weights)
    elif config.estimator == "gdpo":
        reward = sealed.reward
    else:
        reward = trajectory_reward(sealed, source=config.reward_source)
    if reward is None:
        return 0.0 if sealed.status is Status.ERROR else None
    return reward if abs(reward) <= MAX_REWARD else None


def group_result(
    opened: GroupOpened, members: Sequence[SealedTrajectory], rewards: Sequence[float]
) -> EvalGroup:
    """Return the outcome of one group, from its members and their known rewards."""
    versions = [m.oldest_version for m in members if m.oldest_version is not None]
    return EvalGroup(
        group_id=opened.group_id,
        prompt_uid=opened.prompt_uid,
        version=min(versions, default=None),
        num_trajectories=len(members),
        num_lost=opened.num_samples - len(members),
        reward=Spread().with_numbers(rewards),
        best=max(rewards, default=None),
    )
