"""The groups of plans that are withdrawn, as they were before they were planned.

The fold forgets what it has given to a plan, and the events of it may be gone. What a plan was made
from is still there: the seal of every trajectory stands behind its turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from turnstream.batching.config import BatchingConfig
from turnstream.batching.filters import overlong_penalty
from turnstream.batching.lengths import num_response_tokens
from turnstream.batching.plan import Manifest, TrajectoryPlan
from turnstream.batching.rewards import with_posted_reward
from turnstream.types import RewardPosted, SealedTrajectory, TrajectoryKey


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawnGroup:
    """A group whose plan is withdrawn.

    Attributes:
        members: those that are left, in order of (sample, attempt).
        planned: all that the plan had.
        completed_by: the last event that the plan depended on; the group was complete by then.
        opened_by: before that of every group that was never planned: "0-0", "0-1", ... in order of
            the plans.
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
    """The groups of these plans, in order.

    Args:
        manifests: in order of their steps.
        members: what is left of them; whoever is missing here is dead.
    """
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
    """A trajectory with the reward that it was planned with, which may have come after its seal.

    The event that told of it may be gone; then the plan knows the reward, but not its components:
    a run that compares these goes on without the trajectory.

    Args:
        sealed: as its seal says.
        plan: of the batch that is withdrawn.
        posted: the event that told of the reward, if it is still there.
        config: that the plan was made with.
    """
    if not sealed.awaits_reward:
        return sealed
    if posted is not None:
        return with_posted_reward(sealed, posted)
    if config.estimator == "gdpo" or config.reward_source != "outcome":
        return replace(sealed, awaits_reward=False)
    penalty = 0.0
    if config.overlong_buffer:
        penalty = overlong_penalty(
            num_response_tokens(sealed),
            max_tokens=config.overlong_length,
            buffer_tokens=config.overlong_buffer,
        )
    return replace(sealed, reward=plan.reward - penalty, awaits_reward=False)
