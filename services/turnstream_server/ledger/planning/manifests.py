"""The plan of a run: one manifest per step, hash-chained, written once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis
import redis.asyncio

from turnstream.batching.merge.plan import GroupPlan, Manifest
from turnstream.records.manifests import decode_manifest, encode_manifest, manifest_hash
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.stored_values import reading
from turnstream_server.ledger.core.scan import stream_entries
from turnstream_server.ledger.leadership.writes import (
    Changes,
    Term,
    read_facts,
    write,
    write_decision,
)
from turnstream_server.ledger.planning import plan_writes
from turnstream_server.ledger.planning.plan_writes import StepFacts
from turnstream_server.ledger.planning.settling import GroupState

_LAST: Final = 2**64 - 1
"""The highest revision that the id of a plan can have."""


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
    manifest, of_plan = stored.manifest, {"manifest_hash": stored.hash}
    first, *others = plan_writes.slices_of(manifest)

    async def read() -> tuple[StepFacts, list[GroupState]]:
        step = await plan_writes.read_step(term, manifest.step)
        if not plan_writes.check_step(step, manifest, **of_plan):
            return step, []
        for some in others:
            await plan_writes.read_decided_groups(term, some, is_new=True)
        return step, await plan_writes.read_decided_groups(term, first, is_new=True)

    def decide(facts: tuple[StepFacts, list[GroupState]]) -> Changes | None:
        step, groups = facts
        if not groups:
            return None
        return plan_writes.commit(step, manifest, groups, record=stored.record, **of_plan)

    if await write_decision(term, read, decide) is None:
        step = await plan_writes.read_step(term, manifest.step)
        if step.planned < manifest.step:
            return False
    await _mark(term, manifest.step, others)
    return True


async def finish_marking(term: Term) -> None:
    """Mark the groups of a plan that an earlier leader wrote and did not mark to the end."""
    (marking,) = await read_facts(term, ("HGET", keys.run_keys(term.run).frontier, "marking"))
    if marking is None:
        return
    step = int(marking)
    stored = await read_manifest(term.client, term.run, step)
    await _mark(term, step, plan_writes.slices_of(stored.manifest) if stored else [()])


async def _mark(term: Term, step: int, slices: Sequence[Sequence[GroupPlan]]) -> None:
    if not slices:
        return
    for some in slices:
        await write_decision(
            term,
            lambda some=some: plan_writes.read_decided_groups(term, some, is_new=False),
            lambda groups: plan_writes.mark(groups, step=step),
        )
    done = Changes()
    done.expect("frontier", "marking", b"%d" % step)
    done.write("HDEL", "frontier", "marking")
    await write(term, done)


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
        return _stored(entries[0][1][b"r"]) if entries else None


def read_plans(client: redis.Redis, run: str, *, first_step: int = 1) -> Iterator[StoredManifest]:
    """Yield the plans from `first_step` on, in order; one is read at a time, for it may be long."""
    plan = keys.run_keys(run).plan
    for entry_id, record in stream_entries(client, plan, after=f"{first_step - 1}-{_LAST}", page=1):
        with reading(plan, entry_id):
            stored = _stored(record)
        yield stored


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
    if not entries:
        return []
    return await asyncio.to_thread(lambda: [_stored(fields[b"r"]) for _, fields in entries])


def _stored(record: bytes) -> StoredManifest:
    return StoredManifest(
        manifest=decode_manifest(record), record=record, hash=manifest_hash(record)
    )
