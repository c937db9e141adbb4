"""The snapshot of a run's planner, and the removal of older events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import redis.asyncio

from turnstream.batching.planning.plan_batch import event_order
from turnstream.records.snapshots import PlannerSnapshot, decode_snapshot
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream_server.ledger.core.scan import entry_ms
from turnstream_server.ledger.leadership.writes import (
    Changes,
    Term,
    read_facts,
    write_decision,
    write_without_facts,
)

TRIM_SLICE: Final = 500
"""Events of one call, which takes the server a fraction of a millisecond."""

_FACTS: Final = ("position", "step", "withdrawn_at")


async def save_snapshot(term: Term, *, position: str, step: int, record: bytes) -> None:
    """Save the planner's state after the event `position` and the plan of `step`, unless late."""
    snapshot = keys.run_keys(term.run).snapshot

    async def read() -> Any:
        return (await read_facts(term, ("HMGET", snapshot, *_FACTS)))[0]

    await write_decision(
        term, read, lambda facts: saved(facts, position=position, step=step, record=record)
    )


def saved(
    facts: Sequence[bytes | None], *, position: str, step: int, record: bytes
) -> Changes | None:
    """Return the writes of a snapshot; None where a later one is stored, whose fields are known."""
    before, known_step, withdrawn_at = facts
    known = "0-0" if before is None else before.decode()
    if (event_order(known), int(known_step or 0)) > (event_order(position), step):
        return None
    if withdrawn_at == position.encode():
        return None  # a snapshot from before the withdrawal
    changes = Changes()
    for name, value in zip(_FACTS, facts, strict=True):
        changes.expect("snapshot", name, value)
    if known != position:
        changes.write("HSET", "snapshot", "before", known)
    changes.write("HSET", "snapshot", "position", position, "step", step, "record", record)
    return changes


async def read_snapshot(client: redis.asyncio.Redis, run: str) -> PlannerSnapshot | None:
    """Return the snapshot of the run; None before the first."""
    with translating():
        record: Any = await client.execute_command("HGET", keys.run_keys(run).snapshot, "record")
    return None if record is None else await asyncio.to_thread(decode_snapshot, record)


async def trim_events(term: Term) -> int:
    """Remove some events before the last snapshot but one; return their number.

    Other readers need the newer ones. The ids of rejected events are removed with their events.
    """
    known = keys.run_keys(term.run)
    before, oldest = await read_facts(
        term,
        ("HGET", known.snapshot, "before"),
        ("ZRANGE", known.rejected, 0, TRIM_SLICE - 1),
    )
    if before is None:
        return 0
    return sum(await write_without_facts(term, trim(before.decode(), oldest)))


def trim(before: str, oldest: Sequence[bytes]) -> Changes:
    """Return the writes that remove about TRIM_SLICE events before one, and their rejections.

    `oldest` are the ids of the oldest rejected events.

    >>> list(trim("7-0", [b"5-1", b"7-0"]).calls())[0]
    ('ZREM', 'rejected', (b'5-1',))
    """
    changes = Changes()
    first_ms = entry_ms(before)
    old = [each for each in oldest if entry_ms(each.decode()) < first_ms]
    changes.write_each("ZREM", "rejected", old)
    changes.write("XTRIM", "events", "MINID", "~", before, "LIMIT", TRIM_SLICE)
    return changes


async def last_event_id(client: redis.asyncio.Redis, run: str) -> str:
    """Return the id of the newest event; "0-0" before the first."""
    events = keys.run_keys(run).events
    with translating():
        entries: Any = await client.execute_command("XREVRANGE", events, "+", "-", "COUNT", 1)
    return entries[0][0].decode() if entries else "0-0"
