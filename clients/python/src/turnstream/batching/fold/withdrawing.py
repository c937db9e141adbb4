"""The groups of withdrawn plans, as they were before they were planned.

The fold drops the groups of a plan, and their events may be gone. The seal of every trajectory
remains, after its turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.members import FoldState, GroupMembers
from turnstream.batching.merge.plan import GroupPlan, Manifest, TrajectoryPlan
from turnstream.batching.scoring.rewards import length_penalty, with_posted_reward
from turnstream.types import GroupOpened, RewardPosted, SealedTrajectory, TrajectoryKey

_NO_MORE_REFILLS: Final = 1 << 30
"""Refills that a group which was planned counts as having had: its prompt may be gone."""


def state_before(
    manifests: Sequence[Manifest],
    members: Mapping[TrajectoryKey, SealedTrajectory],
    state: FoldState,
) -> FoldState:
    """Return a state in which the groups of these plans are ready again, before all others.

    Members that are missing here are dead. No sample joins these groups, and no refill replaces a
    dead member. The event PlansWithdrawn judges the groups that have fewer members than planned.
    They are opened by "0-0", "0-1", ... in plan order, before any group that was never planned.
    """
    groups: dict[str, GroupMembers] = {}
    ready: dict[str, str] = {}
    for manifest in manifests:
        for plan in manifest.groups:
            seen = state.decided.get(plan.group_id, set[TrajectoryKey]())
            event_id = f"0-{len(groups)}"
            groups[plan.group_id] = _group_of(plan, members, opened_by=event_id, seen=seen)
            ready[plan.group_id] = manifest.last_event_id
    return replace(
        state,
        groups={**groups, **state.groups},
        ready={**ready, **state.ready},
        decided={name: seen for name, seen in state.decided.items() if name not in groups},
    )


def _group_of(
    plan: GroupPlan,
    members: Mapping[TrajectoryKey, SealedTrajectory],
    *,
    opened_by: str,
    seen: set[TrajectoryKey],
) -> GroupMembers:
    """Return a group that was planned, with its living members; all other samples have ended."""
    planned = [trajectory.key for trajectory in plan.trajectories]
    left = {key.sample: members[key] for key in planned if key in members}
    num_samples = 1 + max(key.sample for key in planned)
    opened = GroupOpened(
        group_id=plan.group_id,
        prompt_uid=plan.prompt_uid,
        num_samples=num_samples,
        num_needed=len(planned),
    )
    return GroupMembers(
        opened,
        opened_by,
        members=left,
        ended=set(range(num_samples)) - left.keys(),
        num_asked=_NO_MORE_REFILLS,
        seen=seen | {*planned},
    )


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
