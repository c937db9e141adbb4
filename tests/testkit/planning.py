"""Plans of ready groups, and what a trajectory stores for its rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from testkit.plans import config, sealed, trajectory_plan
from turnstream.batching.config import BatchingConfig
from turnstream.batching.fold.decisions import ReadyGroup
from turnstream.batching.merge.merging import plan_sequences, store_turns
from turnstream.batching.merge.plan import GroupPlan, Manifest, TrajectoryPlan
from turnstream.batching.planning.plan_batch import plan_batch
from turnstream.batching.rows.assemble import assemble_rows
from turnstream.types import (
    DeclaredColumn,
    Rows,
    SealedTrajectory,
    Status,
    StoredTurn,
    StoredTurns,
    TrajectoryKey,
    Turn,
)

Payload = dict[TrajectoryKey, list[StoredTurn]]


def ready(
    group_id: str, *members: SealedTrajectory, rewards: Sequence[float] = (), event: str = "1-0"
) -> ReadyGroup:
    """A complete group of these members, or of one member for each reward."""
    own = members or tuple(
        sealed(group_id, sample=sample, reward=reward) for sample, reward in enumerate(rewards)
    )
    return ReadyGroup(group_id=group_id, prompt_uid="uid", members=own, completed_by=event)


def plan(*groups: ReadyGroup, of: BatchingConfig | None = None, **changes: Any) -> Manifest:
    """The plan of a batch of these groups, with step 3 and row 100 as defaults."""
    fields: dict[str, Any] = {
        "run": "run",
        "step": 3,
        "lineage": "main",
        "previous_hash": "ab",
        "first_row_id": 100,
        "config_revision": 2,
        **changes,
    }
    return plan_batch(groups, config=of or config(len(groups)), **fields)


def stored_group(
    *episodes: Sequence[Turn], rewards: Sequence[float], statuses: Sequence[Status] = ()
) -> tuple[ReadyGroup, Payload]:
    """A complete group "a" of these turns, and what is stored of it."""
    members: list[SealedTrajectory] = []
    payload: Payload = {}
    for sample, (turns, reward) in enumerate(zip(episodes, rewards, strict=True)):
        stored = [replace(own, payload_crc=own.index) for own in store_turns(turns)]
        member = sealed(
            "a",
            sample=sample,
            reward=reward,
            turns=[own.shape for own in stored],
            turn_rewards=[0.0 if t.rewards is None else float(t.rewards.sum()) for t in turns],
            payload_crcs=[own.payload_crc for own in stored],
            anchors=[own.anchor for own in stored],
            status=statuses[sample] if statuses else Status.COMPLETED,
        )
        members.append(member)
        payload[member.key] = stored
    return ready("a", *members), payload


def planned_rows(
    key: TrajectoryKey,
    stored: Sequence[StoredTurn],
    *,
    left_out: Collection[int] = (),
    **changes: Any,
) -> TrajectoryPlan:
    """The plan of a trajectory of these turns, merged; every row weighs 1."""
    shapes = [one.shape._replace(is_left_out=one.index in left_out) for one in stored]
    sequences = plan_sequences(shapes, merge=True)
    fields: dict[str, Any] = {
        "key": key,
        "sequences": sequences,
        "weights": (1.0,) * len(sequences),
        "payload_crcs": tuple(one.payload_crc for one in stored),
        **changes,
    }
    return replace(trajectory_plan(), **fields)


def assembled_rows(
    stored: Sequence[StoredTurn], declared: Sequence[DeclaredColumn], left_out: Collection[int] = ()
) -> Rows:
    """The rows of one trajectory with these stored turns and declared columns."""
    plan = planned_rows(TrajectoryKey("g0", 0), stored, left_out=left_out)
    group = GroupPlan(group_id="g0", prompt_uid="", trajectories=(plan,))
    return assemble_rows([group], StoredTurns.of(stored), first_row_id=0, extra_columns=declared)


def rows_of(
    groups: Sequence[GroupPlan],
    payload: Mapping[TrajectoryKey, Sequence[StoredTurn]],
    *,
    first_row_id: int = 0,
    **options: Any,
) -> Rows:
    """The rows of these groups, from the turns of each trajectory."""
    members = [member for group in groups for member in group.trajectories]
    turns = StoredTurns.of([turn for member in members for turn in payload[member.key]])
    return assemble_rows(groups, turns, first_row_id=first_row_id, **options)
