"""The snapshot of a run's planner, and the events that it makes needless."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import redis.asyncio
from redis.exceptions import RedisError

from turnstream.records.snapshots import PlannerSnapshot, decode_snapshot
from turnstream.store.client import keys
from turnstream.store.client.replies import translate
from turnstream.store.client.scripts import Script, run_command_async
from turnstream_server.bus.leadership.leadership import Term

TRIM_SLICE: Final = 500
"""Events of one call, which takes the server a fraction of a millisecond."""

_SAVE = Script("save_snapshot", "turnstream_server.bus.leadership")
_TRIM = Script("trim_events", "turnstream_server.bus.leadership")


async def save_snapshot(term: Term, *, position: str, step: int, record: bytes) -> None:
    """Keep what the planner knows after the event `position` and the plan of `step`.

    A later one stays, where this call comes late.
    """
    names = keys.run_keys(term.run)
    command = _SAVE((names.leader, names.snapshot), term.epoch, position, step, record)
    await run_command_async(term.client, command)


async def read_snapshot(client: redis.asyncio.Redis, run: str) -> PlannerSnapshot | None:
    """The snapshot of the run; None before the first.

    Raises:
        CorruptRecordError: the stored bytes are damaged.
        UnknownFormatError: a newer release wrote it.
    """
    try:
        record: Any = await client.execute_command("HGET", keys.run_keys(run).snapshot, "record")
    except (RedisError, OSError) as error:
        raise translate(error) from error
    return None if record is None else await asyncio.to_thread(decode_snapshot, record)


async def trim_events(term: Term) -> int:
    """Remove some of the events below the snapshot before; how many, 0 once all are gone."""
    names = keys.run_keys(term.run)
    command = _TRIM(
        (names.leader, names.snapshot, names.events, names.rejected), term.epoch, TRIM_SLICE
    )
    return int(await run_command_async(term.client, command))


async def last_event_id(client: redis.asyncio.Redis, run: str) -> str:
    """The id of the newest event; "0-0" before the first."""
    events = keys.run_keys(run).events
    try:
        entries: Any = await client.execute_command("XREVRANGE", events, "+", "-", "COUNT", 1)
    except (RedisError, OSError) as error:
        raise translate(error) from error
    return entries[0][0].decode() if entries else "0-0"
