"""The snapshot of a run's planner, and the removal of older events."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import redis.asyncio

from turnstream.records.snapshots import PlannerSnapshot, decode_snapshot
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream_server.bus.leadership.leadership import LeaderScript, Term

TRIM_SLICE: Final = 500
"""Events of one call, which takes the server a fraction of a millisecond."""

_SAVE = LeaderScript("save_snapshot", "leadership", "snapshot")
_TRIM = LeaderScript("trim_events", "leadership", "snapshot events rejected")


async def save_snapshot(term: Term, *, position: str, step: int, record: bytes) -> None:
    """Save the planner's state after the event `position` and the plan of `step`, unless late."""
    await _SAVE.run(term, position, step, record)


async def read_snapshot(client: redis.asyncio.Redis, run: str) -> PlannerSnapshot | None:
    """Return the snapshot of the run; None before the first."""
    with translating():
        record: Any = await client.execute_command("HGET", keys.run_keys(run).snapshot, "record")
    return None if record is None else await asyncio.to_thread(decode_snapshot, record)


async def trim_events(term: Term) -> int:
    """Remove some events before the last snapshot but one; return their number."""
    return int(await _TRIM.run(term, TRIM_SLICE))


async def last_event_id(client: redis.asyncio.Redis, run: str) -> str:
    """Return the id of the newest event; "0-0" before the first."""
    events = keys.run_keys(run).events
    with translating():
        entries: Any = await client.execute_command("XREVRANGE", events, "+", "-", "COUNT", 1)
    return entries[0][0].decode() if entries else "0-0"
