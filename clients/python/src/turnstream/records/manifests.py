"""Manifests as records. The hash of a batch is the hash of its manifest's stored record."""

from __future__ import annotations

import hashlib

from turnstream.batching.merge.plan import Manifest, TrajectoryPlan
from turnstream.errors import CorruptRecordError
from turnstream.records.encoding import (
    MANIFEST,
    parse_message,
    read_header,
    read_value,
    reading,
    to_message,
    write_frame,
)
from turnstream.wire.v1 import records_pb2 as wire


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the record of a manifest; the same plan always has the same bytes."""
    return write_frame(MANIFEST, to_message(manifest).SerializeToString(deterministic=True))


def decode_manifest(record: bytes) -> Manifest:
    """Return the manifest of a record."""
    message = parse_message(wire.Manifest, read_header(record, kind=MANIFEST))
    with reading("the values of a manifest"):
        manifest = read_value(Manifest, message)
    for group in manifest.groups:
        for trajectory in group.trajectories:
            _check_trajectory(trajectory)
    _check_mini_batches(manifest)
    return manifest


def manifest_hash(record: bytes) -> str:
    """Return the hex SHA-256 of a manifest's record: the batch's name in the chain."""
    return hashlib.sha256(record).hexdigest()


def _check_trajectory(plan: TrajectoryPlan) -> None:
    if len(plan.weights) != len(plan.sequences):
        raise CorruptRecordError(f"{len(plan.weights)} weights for {len(plan.sequences)} rows")
    if len(plan.turn_advantages) not in (0, len(plan.payload_crcs)):
        raise CorruptRecordError(
            f"{len(plan.turn_advantages)} advantages for {len(plan.payload_crcs)} turns"
        )
    for shape in plan.sequences:
        if shape.prompt_length + shape.num_trained_tokens > shape.num_tokens:
            raise CorruptRecordError(
                f"a row of {shape.num_tokens} tokens with a prompt of {shape.prompt_length} "
                f"and {shape.num_trained_tokens} trained ones"
            )


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
