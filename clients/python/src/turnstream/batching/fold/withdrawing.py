"""The groups of withdrawn plans, as they were before they were planned.

The fold drops the groups of a plan, and their events may be gone. The seal of every trajectory
remains, after its turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from turnstream.batching.config import BatchingConfig
from turnstream.batching.merge.plan import Manifest, TrajectoryPlan
from turnstream.batching.scoring.rewards import length_penalty, with_posted_reward
from turnstream.types import RewardPosted, SealedTrajectory, TrajectoryKey


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawnGroup:
    """A group whose plan is withdrawn.

    Attributes:
        members: those that are left, in order of (sample, attempt).
        planned: all that the plan had.
        completed_by: the last event that the plan depended on; the group was complete by then.
        opened_by: lower than for any group that was never planned: "0-0", "0-1", ... in plan order.
    """

    group_id: str
    prompt_uid: str
    members: tuple[SealedTrajectory, ...]
    planned: tuple[TrajectoryKey, ...]
    completed_by: str
    opened_by: str


def withdrawn_groups(
    manifests: Sequence[Manifest], members: Mapping[TrajectoryKey, SealedTrajectory]
) -> Iterator[WithdrawnGroup]:
    """Yield the groups of these plans, in order; members that are missing here are dead."""
    place = 0
    for manifest in manifests:
        for group in manifest.groups:
            planned = tuple(plan.key for plan in group.trajectories)
            yield WithdrawnGroup(
                group_id=group.group_id,
                prompt_uid=group.prompt_uid,
                members=tuple(members[key] for key in planned if key in members),
                planned=planned,
                completed_by=manifest.last_event_id,
                opened_by=f"0-{place}",
            )
            place += 1


def with_planned_reward(
    sealed: SealedTrajectory,
    plan: TrajectoryPlan,
    *,
    posted: RewardPosted | None,
    config: BatchingConfig,
) -> SealedTrajectory:
    """Return a trajectory with its planned reward, which may have been posted after its seal.

    If `posted` is gone, the plan has the reward but not its components. A run that compares
    components then continues without the trajectory. `config` is that of the plan.
    """
    if not sealed.awaits_reward:
        return sealed
    if posted is not None:
        return with_posted_reward(sealed, posted)
    if config.estimator == "gdpo" or config.reward_source != "outcome":
        return replace(sealed, awaits_reward=False)
    reward = plan.reward - length_penalty(sealed, config)
    return replace(sealed, reward=reward, awaits_reward=False)
