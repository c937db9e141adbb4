"""Manifests as records. The hash of a batch is the hash of its manifest's stored record."""

from __future__ import annotations

import hashlib

from google.protobuf.message import DecodeError

from turnstream.batching.merge.plan import (
    GroupPlan,
    Manifest,
    MiniBatchPlan,
    SequenceShape,
    TrajectoryPlan,
)
from turnstream.errors import CorruptRecordError
from turnstream.records.events import decode_key, decode_status, encode_key
from turnstream.records.framing import MANIFEST, read_header, write_frame
from turnstream.records.tag_statistics import decode_figures, encode_figures
from turnstream.types import Denominators
from turnstream.wire.v1 import records_pb2 as wire

_MINI_BATCH = ("first_group", "num_groups", "first_row_id", "num_rows", "width", "response_width")


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the record of a manifest; the same plan always has the same bytes."""
    message = wire.Manifest(
        run=manifest.run,
        step=manifest.step,
        revision=manifest.revision,
        lineage=manifest.lineage,
        previous_hash=manifest.previous_hash,
        assembly_version=manifest.assembly_version,
        config_revision=manifest.config_revision,
        last_event_id=manifest.last_event_id,
        groups=[_encode_group(group) for group in manifest.groups],
        mini_batches=[_encode_mini_batch(plan) for plan in manifest.mini_batches],
        masked_versions=manifest.masked_versions,
        figures=encode_figures(manifest.figures),
    )
    return write_frame(MANIFEST, message.SerializeToString(deterministic=True))


def decode_manifest(record: bytes) -> Manifest:
    """Return the manifest of a record.

    Raises:
        CorruptRecordError: the bytes are damaged or contradict themselves.
        UnknownFormatError: another release wrote it.
    """
    header = read_header(record, kind=MANIFEST)
    try:
        message = wire.Manifest.FromString(header)
    except DecodeError as error:
        raise CorruptRecordError(f"the header of a manifest is unreadable: {error}") from error
    manifest = Manifest(
        run=message.run,
        step=message.step,
        revision=message.revision,
        lineage=message.lineage,
        previous_hash=message.previous_hash,
        assembly_version=message.assembly_version,
        config_revision=message.config_revision,
        last_event_id=message.last_event_id,
        groups=tuple(_decode_group(group) for group in message.groups),
        mini_batches=tuple(_decode_mini_batch(plan) for plan in message.mini_batches),
        masked_versions=tuple(message.masked_versions),
        figures=decode_figures(message.figures),
    )
    _check_mini_batches(manifest)
    return manifest


def manifest_hash(record: bytes) -> str:
    """Return the hex SHA-256 of a manifest's record: the batch's name in the chain."""
    return hashlib.sha256(record).hexdigest()


def _encode_group(group: GroupPlan) -> wire.GroupPlan:
    return wire.GroupPlan(
        group_id=group.group_id,
        prompt_uid=group.prompt_uid,
        trajectories=[_encode_trajectory(trajectory) for trajectory in group.trajectories],
    )


def _decode_group(message: wire.GroupPlan) -> GroupPlan:
    return GroupPlan(
        group_id=message.group_id,
        prompt_uid=message.prompt_uid,
        trajectories=tuple(_decode_trajectory(trajectory) for trajectory in message.trajectories),
    )


def _encode_trajectory(plan: TrajectoryPlan) -> wire.TrajectoryPlan:
    is_uniform = len(set(plan.weights)) == 1
    return wire.TrajectoryPlan(
        key=encode_key(plan.key),
        status=plan.status.value,
        reward=plan.reward,
        advantage=plan.advantage,
        weight=plan.weights[0] if is_uniform else 0.0,
        num_turn_tokens=plan.num_turn_tokens,
        oldest_version=plan.oldest_version,
        newest_version=plan.newest_version,
        has_logprobs=plan.has_logprobs,
        sequences=[_encode_sequence(sequence) for sequence in plan.sequences],
        payload_crcs=plan.payload_crcs,
        row_weights=() if is_uniform else plan.weights,
        is_masked=plan.is_masked,
        turn_advantages=plan.turn_advantages,
    )


def _decode_trajectory(message: wire.TrajectoryPlan) -> TrajectoryPlan:
    weights = tuple(message.row_weights) or (message.weight,) * len(message.sequences)
    if len(weights) != len(message.sequences):
        raise CorruptRecordError(f"{len(weights)} weights for {len(message.sequences)} rows")
    if len(message.turn_advantages) not in (0, len(message.payload_crcs)):
        raise CorruptRecordError(
            f"{len(message.turn_advantages)} advantages for {len(message.payload_crcs)} turns"
        )
    return TrajectoryPlan(
        key=decode_key(message.key),
        status=decode_status(message.status),
        reward=message.reward,
        advantage=message.advantage,
        weights=weights,
        num_turn_tokens=message.num_turn_tokens,
        oldest_version=message.oldest_version if message.HasField("oldest_version") else None,
        newest_version=message.newest_version if message.HasField("newest_version") else None,
        has_logprobs=message.has_logprobs,
        sequences=tuple(_decode_sequence(sequence) for sequence in message.sequences),
        payload_crcs=tuple(message.payload_crcs),
        is_masked=message.is_masked,
        turn_advantages=tuple(message.turn_advantages),
    )


def _encode_sequence(shape: SequenceShape) -> wire.SequenceShape:
    return wire.SequenceShape(
        turns=shape.turns,
        prompt_length=shape.prompt_length,
        num_tokens=shape.num_tokens,
        num_trained_tokens=shape.num_trained_tokens,
    )


def _decode_sequence(message: wire.SequenceShape) -> SequenceShape:
    shape = SequenceShape(
        tuple(message.turns),
        message.prompt_length,
        message.num_tokens,
        message.num_trained_tokens,
    )
    if shape.prompt_length + shape.num_trained_tokens > shape.num_tokens:
        raise CorruptRecordError(
            f"a row of {shape.num_tokens} tokens with a prompt of {shape.prompt_length} "
            f"and {shape.num_trained_tokens} trained ones"
        )
    return shape


def _encode_mini_batch(plan: MiniBatchPlan) -> wire.MiniBatchPlan:
    numbers = {name: getattr(plan, name) for name in _MINI_BATCH}
    denominators = wire.Denominators(**plan.denominators._asdict())
    return wire.MiniBatchPlan(**numbers, denominators=denominators)


def _decode_mini_batch(message: wire.MiniBatchPlan) -> MiniBatchPlan:
    numbers = {name: getattr(message, name) for name in _MINI_BATCH}
    counted = message.denominators
    denominators = Denominators(*(getattr(counted, name) for name in Denominators._fields))
    return MiniBatchPlan(**numbers, denominators=denominators)


def _check_mini_batches(manifest: Manifest) -> None:
    """Check that every group is in one mini-batch, in order, and that row ids have no gap."""
    if not manifest.mini_batches:
        raise CorruptRecordError(f"the manifest of step {manifest.step} has no mini-batch")
    next_group = 0
    next_row_id = manifest.mini_batches[0].first_row_id
    for plan in manifest.mini_batches:
        groups = manifest.groups[plan.first_group : plan.first_group + plan.num_groups]
        rows = sum(len(member.sequences) for group in groups for member in group.trajectories)
        planned = (plan.first_group, plan.first_row_id, plan.num_rows)
        if planned != (next_group, next_row_id, rows) or len(groups) != plan.num_groups:
            raise CorruptRecordError(
                f"a mini-batch of step {manifest.step} has first_group, first_row_id, num_rows = "
                f"{planned}, where its groups say {(next_group, next_row_id, rows)}"
            )
        next_group += plan.num_groups
        next_row_id += rows
    if next_group != len(manifest.groups):
        raise CorruptRecordError(
            f"the mini-batches of step {manifest.step} hold {next_group} "
            f"of {len(manifest.groups)} groups"
        )
