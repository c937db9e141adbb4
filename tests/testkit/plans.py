"""Builders of what the plan of a run is made from and of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from turnstream.batching.config import BatchingConfig, GroupFilter
from turnstream.batching.merge.plan import (
    PLAIN_ASSEMBLY_VERSION,
    GroupPlan,
    Manifest,
    MiniBatchPlan,
    SequenceShape,
    TrajectoryPlan,
)
from turnstream.types import (
    NO_PARENT,
    Denominators,
    SealedTrajectory,
    Status,
    TrajectoryKey,
    TurnShape,
    VersionRun,
)

ZERO_VARIANCE = (GroupFilter(kind="zero_variance"),)
"""Filters of a run that trains no group of equal rewards."""


def config(batch_groups: int = 1, mini_batch_groups: int | None = None) -> BatchingConfig:
    """A run of small batches; use `dataclasses.replace` for the other fields."""
    return BatchingConfig(
        batch_groups=batch_groups, mini_batch_groups=mini_batch_groups or batch_groups
    )


def shape(
    new_prompt: int = 2,
    response: int = 3,
    *,
    parent: int = NO_PARENT,
    shared: int = 0,
    trained: int | None = None,
    is_left_out: bool = False,
) -> TurnShape:
    """Lengths of one turn, in tokens; every response token is trained unless said."""
    return TurnShape(
        parent_turn=parent,
        shared_tokens=shared,
        num_new_prompt_tokens=new_prompt,
        num_response_tokens=response,
        num_trained_tokens=response if trained is None else trained,
        is_left_out=is_left_out,
    )


def sealed(
    group_id: str = "g0",
    *,
    sample: int = 0,
    attempt: int = 0,
    reward: float | None = 1.0,
    turns: Sequence[TurnShape] = (shape(),),
    turn_rewards: Sequence[float] | None = None,
    payload_crcs: Sequence[int] | None = None,
    anchors: Sequence[int | None] = (),
    status: Status = Status.COMPLETED,
    version: int | None = None,
    turn_versions: Sequence[Sequence[tuple[int | None, int]]] = (),
    has_logprobs: bool = False,
    tags: Mapping[str, str] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> SealedTrajectory:
    """A finished trajectory as the plan sees it.

    Unless given, the token rewards of every turn sum to 0.0 and the payload CRCs count from 1.
    `version` is the one that sampled all of it; `turn_versions` are the (version, number of trained
    tokens) of every turn where there are several.
    """
    rewards = turn_rewards if turn_rewards is not None else [0.0] * len(turns)
    known = [v for own in turn_versions for v, _ in own if v is not None]
    crcs = payload_crcs if payload_crcs is not None else range(1, len(turns) + 1)
    return SealedTrajectory(
        key=TrajectoryKey(group_id, sample, attempt),
        lease_epoch=1,
        status=status,
        reward=reward,
        reward_components={},
        turns=tuple(turns),
        turn_rewards=tuple(rewards),
        payload_crcs=tuple(crcs),
        anchors=tuple(anchors),
        oldest_version=min(known, default=version),
        newest_version=max(known, default=version),
        turn_versions=tuple(tuple(VersionRun(*run) for run in own) for own in turn_versions),
        num_payload_bytes=sum(turn.num_tokens for turn in turns) * 4,
        has_logprobs=has_logprobs,
        tags=dict(tags or {}),
        metrics=dict(metrics or {}),
    )


def trajectory_plan(
    group_id: str = "g0", *, sample: int = 0, reward: float = 1.0, advantage: float = 0.5
) -> TrajectoryPlan:
    """A planned trajectory of one turn and one row: 2 prompt and 3 response tokens."""
    return TrajectoryPlan(
        key=TrajectoryKey(group_id, sample),
        status=Status.COMPLETED,
        reward=reward,
        advantage=advantage,
        weights=(1.0,),
        num_turn_tokens=5,
        oldest_version=0,
        newest_version=0,
        has_logprobs=False,
        sequences=(SequenceShape(turns=(0,), prompt_length=2, num_tokens=5, num_trained_tokens=3),),
        payload_crcs=(1,),
    )


def manifest(*group_ids: str, run: str = "run", step: int = 1) -> Manifest:
    """The plan of a batch of one mini-batch: two trajectories of one row in every group."""
    groups = tuple(_group_plan(group_id) for group_id in group_ids or ("g0",))
    return Manifest(
        run=run,
        step=step,
        revision=0,
        lineage="main",
        previous_hash="" if step == 1 else "0" * 64,
        assembly_version=PLAIN_ASSEMBLY_VERSION,
        config_revision=1,
        last_event_id=f"{step}-0",
        groups=groups,
        mini_batches=(_mini_batch_plan(groups),),
    )


def _group_plan(group_id: str) -> GroupPlan:
    members = (
        trajectory_plan(group_id, sample=0, reward=1.0, advantage=0.5),
        trajectory_plan(group_id, sample=1, reward=0.0, advantage=-0.5),
    )
    return GroupPlan(group_id=group_id, prompt_uid="", trajectories=members)


def _mini_batch_plan(groups: Sequence[GroupPlan]) -> MiniBatchPlan:
    rows = list(_rows_of(groups))
    return MiniBatchPlan(
        first_group=0,
        num_groups=len(groups),
        first_row_id=0,
        num_rows=len(rows),
        width=max(row.num_tokens for row in rows),
        response_width=max(row.num_tokens - row.prompt_length for row in rows),
        denominators=Denominators(
            num_tokens=sum(row.num_trained_tokens for row in rows),
            num_sequences=len(rows),
            num_trajectories=sum(len(group.trajectories) for group in groups),
            num_groups=len(groups),
            weight_sum=float(len(rows)),
            length_constant=0,
        ),
    )


def _rows_of(groups: Sequence[GroupPlan]) -> Iterable[SequenceShape]:
    for group in groups:
        for member in group.trajectories:
            yield from member.sequences
