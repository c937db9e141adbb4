"""From ready groups to the manifest of a batch: rows, advantages and denominators, no tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from turnstream.batching.config import BatchingConfig
from turnstream.batching.config.values import GREEDY_SAMPLE
from turnstream.batching.fold.decisions import ReadyGroup
from turnstream.batching.fold.staleness import is_wholly_of, tokens_of, version_span
from turnstream.batching.merge.merging import plan_sequences
from turnstream.batching.merge.plan import (
    ASSEMBLY_VERSION,
    PLAIN_ASSEMBLY_VERSION,
    GroupPlan,
    Manifest,
    MiniBatchPlan,
    SequenceShape,
    TrajectoryPlan,
)
from turnstream.batching.scoring.advantages import (
    FloatArray,
    GroupOutcomes,
    gigpo,
    trajectory_advantages,
    whitened,
)
from turnstream.batching.scoring.denominators import plan_denominators
from turnstream.batching.scoring.filters import is_compared, is_greedy, is_masked, row_weights
from turnstream.batching.scoring.rewards import (
    length_rewards,
    planned_reward,
    planned_turn_rewards,
    turn_anchors,
)
from turnstream.batching.scoring.tag_statistics import sum_up
from turnstream.errors import BatchingError
from turnstream.types import SealedTrajectory


def num_groups_to_plan(num_ready: int, config: BatchingConfig, *, is_final: bool) -> int:
    """Return how many of the ready groups the next batch takes; 0 means to wait."""
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
    chosen_at: str = "",
    masked_versions: tuple[int, ...] = (),
    revised_at: str = "0-0",
) -> Manifest:
    """Return the immutable plan of one batch of these groups, in this order.

    Mini-batches take `mini_batch_groups` groups each; the last one of a short batch takes the rest.
    Advantages are estimated over the whole batch in float64, and kept as float32 values. The plan
    is a function of the arguments, to the bit. `chosen_at` is the BatchDue event of a chosen batch,
    `revised_at` the event since which the run has `config`, and no token sampled by
    `masked_versions` is trained.
    """
    if not ready:
        raise BatchingError("a batch of no groups")
    masked = frozenset(masked_versions)
    planned = [[_planned(member, config, masked) for member in group.members] for group in ready]
    advantages = _advantages(planned, config)
    groups = tuple(
        GroupPlan(
            group_id=group.group_id,
            prompt_uid=group.prompt_uid,
            trajectories=tuple(
                _trajectory_plan(member, advantage, config)
                for member, advantage in zip(members, group_advantages, strict=True)
            ),
        )
        for group, members, group_advantages in zip(ready, planned, advantages, strict=True)
    )
    members = [member for group in ready for member in group.members]
    leaves_out = any(turn.is_left_out for member in members for turn in member.turns)
    return Manifest(
        run=run,
        step=step,
        revision=revision,
        lineage=lineage,
        previous_hash=previous_hash,
        assembly_version=ASSEMBLY_VERSION if leaves_out else PLAIN_ASSEMBLY_VERSION,
        config_revision=config_revision,
        last_event_id=chosen_at
        or max([revised_at, *(g.completed_by for g in ready)], key=event_order),
        groups=groups,
        mini_batches=tuple(_mini_batches(groups, config, first_row_id=first_row_id)),
        masked_versions=masked_versions,
        figures=sum_up((member, planned_reward(member, config)) for member in members),
    )


class _Member(NamedTuple):
    """A trajectory and its rows.

    Attributes:
        lost: tokens of every turn that masked versions sampled; empty for none.
        sequences: with the tokens that will be trained.
        num_trainable_tokens: those that its turns have for training; more where some are masked.
        versions: oldest and newest that sampled what will be trained; None if unknown.
    """

    sealed: SealedTrajectory
    is_masked: bool
    sequences: tuple[SequenceShape, ...]
    num_trainable_tokens: int
    versions: tuple[int | None, int | None]
    lost: tuple[int, ...] = ()

    @property
    def turn_tokens(self) -> list[int]:
        """Return the tokens of every turn that will be trained."""
        turns = self.sealed.turns
        if self.is_masked:
            return [0] * len(turns)
        lost = self.lost or (0,) * len(turns)
        return [turn.num_trained_tokens - own for turn, own in zip(turns, lost, strict=True)]

    @property
    def num_trained_tokens(self) -> int:
        return sum([sequence.num_trained_tokens for sequence in self.sequences])


def _planned(
    member: SealedTrajectory, config: BatchingConfig, masked_versions: frozenset[int]
) -> _Member:
    sequences = plan_sequences(member.turns, merge=config.merge)
    num_trainable = sum([sequence.num_trained_tokens for sequence in sequences])
    versions = member.oldest_version, member.newest_version
    if is_masked(member, config) or is_wholly_of(member, masked_versions):
        sequences = tuple([sequence._replace(num_trained_tokens=0) for sequence in sequences])
        return _Member(member, True, sequences, num_trainable, (None, None))
    if masked_versions and member.turn_versions:
        lost = tuple(tokens_of(member, masked_versions))
        sequences = tuple([_without(sequence, lost) for sequence in sequences])
        versions = version_span(member, without=masked_versions)
        return _Member(member, False, sequences, num_trainable, versions, lost)
    return _Member(member, False, sequences, num_trainable, versions)


def _without(sequence: SequenceShape, lost: Sequence[int]) -> SequenceShape:
    """Return the row with so many tokens of every turn untrained."""
    num_lost = sum([lost[turn] for turn in sequence.turns])
    return sequence._replace(num_trained_tokens=sequence.num_trained_tokens - num_lost)


_Advantage = tuple[float, tuple[float, ...]]
"""Float32 advantages of a trajectory, and of its turns where the estimator has them."""


def _advantages(
    planned: Sequence[Sequence[_Member]], config: BatchingConfig
) -> list[list[_Advantage]]:
    """Return the advantage of every trajectory of every group; 0 where its reward is left out."""
    compared = [[m for m in members if is_compared(m.sealed, config)] for members in planned]
    estimated = trajectory_advantages(
        [_outcomes(members, config) for members in compared],
        estimator=config.estimator,
        singleton=config.singleton_advantage,
        component_weights=[weight for _, weight in config.component_weights],
        divide_by_std=config.divide_by_std,
        pass_k=config.pass_k,
        normalize=config.normalize_advantages,
    )
    of_turns = _turn_advantages(compared, config)
    advantages: list[list[_Advantage]] = []
    for members, own, values, turns in zip(planned, compared, estimated, of_turns, strict=True):
        found = zip(own, values.astype(np.float32).tolist(), turns, strict=True)
        by_key = {m.sealed.key: (advantage, turns) for m, advantage, turns in found}
        advantages.append([by_key.get(m.sealed.key) or _left_out(m, config) for m in members])
    return advantages


def _turn_advantages(
    compared: Sequence[Sequence[_Member]], config: BatchingConfig
) -> list[list[tuple[float, ...]]]:
    """Return the advantages of the turns of every group, by trajectory; empty without gigpo."""
    if config.estimator != "gigpo":
        return [[()] * len(members) for members in compared]
    estimated = [_gigpo(members, config) for members in compared]
    if config.normalize_advantages == "batch":
        counts = [
            np.array([m.turn_tokens[turn] for turn in m.sealed.kept_turns], np.int64)
            for members in compared
            for m in members
        ]
        white = iter(whitened(list(chain.from_iterable(estimated)), num_tokens=counts))
        estimated = [[next(white) for _ in group] for group in estimated]
    return [
        [_of_all_turns(member, values) for member, values in zip(members, group, strict=True)]
        for members, group in zip(compared, estimated, strict=True)
    ]


def _of_all_turns(member: _Member, values: FloatArray) -> tuple[float, ...]:
    """Return the values of kept turns in float32, and 0 for turns that are left out."""
    own = np.zeros(len(member.sealed.turns), np.float32)
    own[member.sealed.kept_turns] = values
    return tuple(own.tolist())


def _gigpo(compared: Sequence[_Member], config: BatchingConfig) -> list[FloatArray]:
    sealed = [member.sealed for member in compared]
    turn_rewards = [np.array(planned_turn_rewards(each, config), np.float64) for each in sealed]
    for own, shaped in zip(turn_rewards, length_rewards(sealed, config), strict=True):
        own[-1] += shaped
    return gigpo(
        _outcomes(compared, config).rewards,
        turn_rewards=turn_rewards,
        anchors=[*map(turn_anchors, sealed)],
        gamma=config.turn_discount,
        turn_weight=config.turn_weight,
        divide_by_std=config.divide_by_std,
        singleton=config.singleton_advantage,
    )


def _left_out(member: _Member, config: BatchingConfig) -> _Advantage:
    return 0.0, (0.0,) * len(member.sealed.turns) if config.estimator == "gigpo" else ()


def _outcomes(members: Sequence[_Member], config: BatchingConfig) -> GroupOutcomes:
    """Return the compared values of one group; a baseline weighs masked responses too."""
    sealed = [member.sealed for member in members]
    if sealed and config.has_greedy_sample and not is_greedy(sealed[0], config):
        raise BatchingError(
            f"group {sealed[0].key.group_id!r} has no greedy sample {GREEDY_SAMPLE}, with which "
            f"estimator={config.estimator!r} compares"
        )
    rewards = np.array([_compared(each, config) for each in sealed], np.float64)
    if config.length_reward_weight:
        rewards += length_rewards(sealed, config)
    return GroupOutcomes(
        rewards=rewards,
        num_tokens=np.array([member.num_trained_tokens for member in members], np.int64),
        baseline_weights=_baseline_weights(members, config) if config.estimator == "opo" else None,
    )


def _baseline_weights(members: Sequence[_Member], config: BatchingConfig) -> FloatArray:
    name = config.baseline_weight
    weights = [m.sealed.metrics[name] if name else m.num_trainable_tokens for m in members]
    return np.array(weights, np.float64)


def _compared(member: SealedTrajectory, config: BatchingConfig) -> float | list[float]:
    if config.estimator == "gdpo":
        return [member.reward_components[name] for name, _ in config.component_weights]
    return planned_reward(member, config)


def _trajectory_plan(
    member: _Member, advantages: _Advantage, config: BatchingConfig
) -> TrajectoryPlan:
    sealed = member.sealed
    advantage, turn_advantages = advantages
    return TrajectoryPlan(
        key=sealed.key,
        status=sealed.status,
        reward=planned_reward(sealed, config),
        advantage=advantage,
        weights=row_weights(
            config.row_weights, [row.num_trained_tokens for row in member.sequences]
        ),
        num_turn_tokens=sum([t.num_tokens for t in sealed.turns if not t.is_left_out]),
        oldest_version=member.versions[0],
        newest_version=member.versions[1],
        has_logprobs=sealed.has_logprobs,
        sequences=member.sequences,
        payload_crcs=sealed.payload_crcs,
        is_masked=member.is_masked,
        turn_advantages=turn_advantages,
    )


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


def event_order(event_id: str) -> tuple[int, ...]:
    """Return an event id as numbers: as text, "10-0" would come before "9-0"."""
    return tuple(map(int, event_id.split("-")))
