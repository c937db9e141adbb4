"""From ready groups to the manifest of a batch: rows, advantages and denominators, no tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from turnstream.batching.advantages import GroupOutcomes, trajectory_advantages
from turnstream.batching.config import BatchingConfig
from turnstream.batching.denominators import plan_denominators
from turnstream.batching.filters import row_weights
from turnstream.batching.merge import plan_sequences
from turnstream.batching.plan import (
    ASSEMBLY_VERSION,
    GroupPlan,
    Manifest,
    MiniBatchPlan,
    SequenceShape,
    TrajectoryPlan,
)
from turnstream.batching.readiness import ReadyGroup
from turnstream.batching.rewards import planned_reward
from turnstream.errors import BatchingError
from turnstream.types import SealedTrajectory


def num_groups_to_plan(num_ready: int, config: BatchingConfig, *, is_final: bool) -> int:
    """How many of the ready groups the next batch takes; 0 means to wait.

    Args:
        num_ready: groups that could be planned now.
        config: of the run.
        is_final: no more groups will come: what is left makes a last, short batch.
    """
    if num_ready >= config.batch_groups:
        return config.batch_groups
    return num_ready if is_final else 0


def plan_batch(
    ready: Sequence[ReadyGroup],
    *,
    config: BatchingConfig,
    run: str,
    step: int,
    lineage: str,
    previous_hash: str,
    first_row_id: int,
    config_revision: int,
    revision: int = 0,
) -> Manifest:
    """The immutable plan of one batch of these groups, in this order.

    Mini-batches take `mini_batch_groups` groups each; the last one of a short batch takes what is
    left. Groups are never cut. Advantages are estimated once per trajectory over the whole batch,
    in float64, and kept as float32 values.

    Raises:
        BatchingError: there is no group.
    """
    if not ready:
        raise BatchingError("a batch of no groups")
    rows = [[_sequences(member, config) for member in group.members] for group in ready]
    advantages = _advantages(ready, rows, config)
    groups = tuple(
        GroupPlan(
            group_id=group.group_id,
            prompt_uid=group.prompt_uid,
            trajectories=tuple(
                _trajectory_plan(member, sequences, advantage, config)
                for member, sequences, advantage in zip(
                    group.members, member_rows, group_advantages, strict=True
                )
            ),
        )
        for group, member_rows, group_advantages in zip(ready, rows, advantages, strict=True)
    )
    return Manifest(
        run=run,
        step=step,
        revision=revision,
        lineage=lineage,
        previous_hash=previous_hash,
        assembly_version=ASSEMBLY_VERSION,
        config_revision=config_revision,
        last_event_id=max((group.completed_by for group in ready), key=_event_order),
        groups=groups,
        mini_batches=tuple(_mini_batches(groups, config, first_row_id=first_row_id)),
    )


PlannedRows = tuple[SequenceShape, ...]


def _sequences(member: SealedTrajectory, config: BatchingConfig) -> PlannedRows:
    return plan_sequences(member.turns, merge=config.merge)


def _advantages(
    ready: Sequence[ReadyGroup], rows: Sequence[Sequence[PlannedRows]], config: BatchingConfig
) -> list[list[float]]:
    outcomes = [
        GroupOutcomes(
            rewards=np.array([_compared(member, config) for member in group.members], np.float64),
            num_tokens=np.array([_num_trained(sequences) for sequences in member_rows], np.int64),
        )
        for group, member_rows in zip(ready, rows, strict=True)
    ]
    estimated = trajectory_advantages(
        outcomes,
        estimator=config.estimator,
        singleton=config.singleton_advantage,
        component_weights=[weight for _, weight in config.component_weights],
    )
    return [values.astype(np.float32).tolist() for values in estimated]


def _compared(member: SealedTrajectory, config: BatchingConfig) -> float | list[float]:
    if config.estimator == "gdpo":
        return [member.reward_components[name] for name, _ in config.component_weights]
    return planned_reward(member, config)


def _num_trained(sequences: PlannedRows) -> int:
    return sum([sequence.num_trained_tokens for sequence in sequences])


def _trajectory_plan(
    member: SealedTrajectory, sequences: PlannedRows, advantage: float, config: BatchingConfig
) -> TrajectoryPlan:
    return TrajectoryPlan(
        key=member.key,
        status=member.status,
        reward=planned_reward(member, config),
        advantage=advantage,
        weights=_weights(sequences, config),
        num_turn_tokens=sum([turn.num_tokens for turn in member.turns]),
        oldest_version=member.oldest_version,
        newest_version=member.newest_version,
        has_logprobs=member.has_logprobs,
        sequences=sequences,
        payload_crcs=member.payload_crcs,
    )


def _weights(sequences: PlannedRows, config: BatchingConfig) -> tuple[float, ...]:
    """What each of these rows weighs; 1 also where it has no trained token and counts nowhere."""
    if len(sequences) == 1 or config.row_weights == "per_row":
        return (1.0,) * len(sequences)
    weights = row_weights(
        config.row_weights,
        trajectory_B=np.zeros(len(sequences), np.int64),
        num_trained_B=np.array([row.num_trained_tokens for row in sequences], np.int64),
    )
    return tuple(weights.tolist())


def _mini_batches(
    groups: Sequence[GroupPlan], config: BatchingConfig, *, first_row_id: int
) -> Iterator[MiniBatchPlan]:
    for first_group in range(0, len(groups), config.mini_batch_groups):
        part = groups[first_group : first_group + config.mini_batch_groups]
        rows = [
            sequence
            for group in part
            for trajectory in group.trajectories
            for sequence in trajectory.sequences
        ]
        yield MiniBatchPlan(
            first_group=first_group,
            num_groups=len(part),
            first_row_id=first_row_id,
            num_rows=len(rows),
            width=max([row.num_tokens for row in rows]),
            response_width=max([row.num_tokens - row.prompt_length for row in rows]),
            denominators=plan_denominators(part, length_constant=config.length_constant),
        )
        first_row_id += len(rows)


def _event_order(event_id: str) -> tuple[int, ...]:
    """Stream ids are "<number>-<number>": as text, "10-0" would come before "9-0"."""
    return tuple(int(part) for part in event_id.split("-"))
