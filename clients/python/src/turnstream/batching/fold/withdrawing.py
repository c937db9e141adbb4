"""The groups of withdrawn plans, as they were before they were planned.

The fold drops the groups of a plan, and their events may be gone. The seal of every trajectory
remains, after its turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.members import FoldState, GroupMembers
from turnstream.batching.merge.plan import Manifest, TrajectoryPlan
from turnstream.batching.scoring.rewards import length_penalty
from turnstream.types import GroupOpened, SealedTrajectory, TrajectoryKey


def state_before(
    manifests: Sequence[Manifest],
    members: Mapping[TrajectoryKey, SealedTrajectory],
    state: FoldState,
) -> FoldState:
    """Return a state in which the groups of these plans are ready again, before all others.

    Members that are missing here are dead, and no refill replaces them: the prompt may be gone. The
    event PlansWithdrawn judges the groups that have fewer members than planned.
    """
    groups: dict[str, GroupMembers] = {}
    ready: dict[str, str] = {}
    for plan, last_event_id in [(g, m.last_event_id) for m in manifests for g in m.groups]:
        name, planned = plan.group_id, [each.key for each in plan.trajectories]
        left = {key.sample: members[key] for key in planned if key in members}
        samples = range(1 + max(key.sample for key in planned))
        groups[name] = GroupMembers(
            GroupOpened(
                group_id=name,
                prompt_uid=plan.prompt_uid,
                num_samples=len(samples),
                num_needed=len(planned),
            ),
            opened_by=f"0-{len(groups)}",
            members=left,
            ended={*samples} - left.keys(),
            num_asked=1 << 30,
            seen=state.decided.get(name, set[TrajectoryKey]()) | {*planned},
        )
        ready[name] = last_event_id
    return replace(
        state,
        groups={**groups, **state.groups},
        ready={**ready, **state.ready},
        decided={name: seen for name, seen in state.decided.items() if name not in groups},
    )


def with_planned_reward(
    sealed: SealedTrajectory, plan: TrajectoryPlan, *, config: BatchingConfig
) -> SealedTrajectory:
    """Return a trajectory with its planned reward, which may have been posted after its seal.

    The plan has no components: a run that compares them continues without the trajectory.
    """
    if not sealed.awaits_reward:
        return sealed
    is_whole = config.estimator != "gdpo" and config.reward_source == "outcome"
    reward = plan.reward - length_penalty(sealed, config) if is_whole else None
    return replace(sealed, reward=reward, awaits_reward=False)
