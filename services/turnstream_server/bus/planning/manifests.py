"""The plan of a run: one manifest per step, hash-chained, written once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import RedisError

from turnstream.batching.merge.plan import Manifest
from turnstream.records.manifests import decode_manifest, encode_manifest, manifest_hash
from turnstream.store.client import keys
from turnstream.store.client.replies import translate, translating
from turnstream.store.client.scripts import Script, run_command_async
from turnstream.store.client.stored_values import reading
from turnstream_server.bus.leadership.leadership import Term

_WRITE = Script("write_manifest", "turnstream_server.bus.planning")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredManifest:
    """A manifest as the store has it.

    Attributes:
        manifest: the plan.
        record: the stored bytes.
        hash: hex SHA-256 of `record`: the batch's name in the chain.
    """

    manifest: Manifest
    record: bytes
    hash: str


def encode_for_store(manifest: Manifest) -> StoredManifest:
    """The manifest with the bytes and the name that it will have in the store."""
    record = encode_manifest(manifest)
    return StoredManifest(manifest=manifest, record=record, hash=manifest_hash(record))


async def write_manifest(term: Term, planned: Manifest | StoredManifest) -> bool:
    """Write the plan of the next step and move its trajectories to "planned", all or nothing.

    Writing the same plan again changes nothing.

    Returns:
        False if the step must be planned again, and nothing was written: the run is paused, the
            step
        has another config, or the trainer returned to another lineage.

    Raises:
        ConflictError: the step has another plan or is not the next one, the chain differs, the
            config is not in force, or a trajectory is not sealed: nothing was written.
    """
    stored = planned if isinstance(planned, StoredManifest) else encode_for_store(planned)
    manifest = stored.manifest
    run_keys = keys.run_keys(term.run)
    ids = (keys.trajectory_id(t.key) for group in manifest.groups for t in group.trajectories)
    command = _WRITE(
        (
            run_keys.leader,
            run_keys.frontier,
            run_keys.batches,
            run_keys.plan,
            run_keys.ledger,
            run_keys.counts,
            run_keys.groups,
            run_keys.members,
            run_keys.deadlines,
            run_keys.refills,
            run_keys.leases,
            run_keys.wake,
            run_keys.tasks,
            run_keys.prompts,
            run_keys.config,
            run_keys.held,
            run_keys.budget,
            run_keys.times,
        ),
        term.epoch,
        manifest.step,
        stored.hash,
        manifest.previous_hash,
        stored.record,
        manifest.config_revision,
        manifest.lineage,
        *ids,
    )
    return await run_command_async(term.client, command) >= 0


async def read_manifest(client: redis.asyncio.Redis, run: str, step: int) -> StoredManifest | None:
    """The plan of a step, its newest revision; None where there is none yet.

    Raises:
        CorruptRecordError: the stored bytes are damaged.
        UnknownFormatError: a newer release wrote it.
    """
    plan = keys.run_keys(run).plan
    try:
        entries: Any = await client.execute_command("XREVRANGE", plan, step, step, "COUNT", 1)
    except (RedisError, OSError) as error:
        raise translate(error) from error
    stored = await _stored_in_thread(entries)
    return stored[0] if stored else None


def read_plan(client: redis.Redis, run: str, step: int) -> StoredManifest | None:
    """The same as `read_manifest`, without asyncio."""
    plan = keys.run_keys(run).plan
    with reading(plan, str(step)), translating():
        entries: Any = client.xrevrange(plan, max=step, min=step, count=1)
        return _stored(entries[0]) if entries else None


async def read_manifests(
    client: redis.asyncio.Redis, run: str, *, first_step: int, max_count: int
) -> list[StoredManifest]:
    """The plans from `first_step` on, in order, at most `max_count` of them.

    Raises:
        CorruptRecordError: the stored bytes are damaged.
        UnknownFormatError: a newer release wrote one.
    """
    plan = keys.run_keys(run).plan
    try:
        entries: Any = await client.execute_command(
            "XRANGE", plan, first_step, "+", "COUNT", max_count
        )
    except (RedisError, OSError) as error:
        raise translate(error) from error
    return await _stored_in_thread(entries)


async def _stored_in_thread(entries: Sequence[Any]) -> list[StoredManifest]:
    """Decode in a thread: one manifest of three thousand trajectories takes 30 ms."""
    return await asyncio.to_thread(lambda: [_stored(entry) for entry in entries]) if entries else []


def _stored(entry: Sequence[Any]) -> StoredManifest:
    record: bytes = entry[1][b"r"]
    return StoredManifest(
        manifest=decode_manifest(record), record=record, hash=manifest_hash(record)
    )
