"""The plan of a run: one manifest per step, hash-chained, written once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio

from turnstream.batching.merge.plan import Manifest
from turnstream.records.manifests import decode_manifest, encode_manifest, manifest_hash
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.stored_values import reading
from turnstream_server.bus.leadership.leadership import LeaderScript, Term

_WRITE = LeaderScript(
    "write_manifest",
    "planning",
    "frontier batches plan ledger counts groups members deadlines refills leases wake tasks "
    "prompts config held budget times",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredManifest:
    """A manifest, its stored bytes, and their hex SHA-256: the batch's name in the chain."""

    manifest: Manifest
    record: bytes
    hash: str


def encode_for_store(manifest: Manifest) -> StoredManifest:
    """Return a manifest with its bytes and its hash."""
    record = encode_manifest(manifest)
    return StoredManifest(manifest=manifest, record=record, hash=manifest_hash(record))


async def write_manifest(term: Term, stored: StoredManifest) -> bool:
    """Write the plan of the next step and move its trajectories to "planned", all or nothing.

    Writing the same plan again changes nothing.

    Returns:
        False if the step must be planned again, and nothing was written: the run is paused, the
        step has another config, or the trainer returned to another lineage.

    Raises:
        ConflictError: the step has another plan or is not the next one, the chain differs, the
            config is not in force, or a trajectory is not sealed: nothing was written.
    """
    manifest = stored.manifest
    ids = (keys.trajectory_id(t.key) for group in manifest.groups for t in group.trajectories)
    answer: int = await _WRITE.run(
        term,
        manifest.step,
        stored.hash,
        manifest.previous_hash,
        stored.record,
        manifest.config_revision,
        manifest.lineage,
        *ids,
    )
    return answer >= 0


async def read_manifest(client: redis.asyncio.Redis, run: str, step: int) -> StoredManifest | None:
    """Return the newest plan of a step, or None."""
    plan = keys.run_keys(run).plan
    with translating():
        entries: Any = await client.execute_command("XREVRANGE", plan, step, step, "COUNT", 1)
    stored = await _stored_in_thread(entries)
    return stored[0] if stored else None


def read_plan(client: redis.Redis, run: str, step: int) -> StoredManifest | None:
    """Return the newest plan of a step, or None."""
    plan = keys.run_keys(run).plan
    with reading(plan, str(step)), translating():
        entries: Any = client.xrevrange(plan, max=step, min=step, count=1)
        return _stored(entries[0]) if entries else None


def read_plans(
    client: redis.Redis, run: str, *, first_step: int, max_count: int
) -> list[StoredManifest]:
    """Return the plans from `first_step` on, in order, at most `max_count` of them."""
    plan = keys.run_keys(run).plan
    with reading(plan), translating():
        entries: Any = client.xrange(plan, min=first_step, count=max_count)
        return [_stored(entry) for entry in entries]


async def read_manifests(
    client: redis.asyncio.Redis, run: str, *, first_step: int, max_count: int
) -> list[StoredManifest]:
    """Return the plans from `first_step` on, in order, at most `max_count` of them."""
    plan = keys.run_keys(run).plan
    with translating():
        entries: Any = await client.execute_command(
            "XRANGE", plan, first_step, "+", "COUNT", max_count
        )
    return await _stored_in_thread(entries)


async def _stored_in_thread(entries: Sequence[Any]) -> list[StoredManifest]:
    """Decode in a thread: one manifest of three thousand trajectories takes 30 ms."""
    return await asyncio.to_thread(lambda: [_stored(entry) for entry in entries]) if entries else []


def _stored(entry: Sequence[Any]) -> StoredManifest:
    record: bytes = entry[1][b"r"]
    return StoredManifest(
        manifest=decode_manifest(record), record=record, hash=manifest_hash(record)
    )
