"""The bound of what dead letters keep: the oldest make room."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import redis.asyncio
from redis.exceptions import RedisError

from turnstream.store import keys
from turnstream.store.replies import translate
from turnstream.store.scripts import Command, run_commands_async
from turnstream_server.bus.letters import discard_event_command, discard_letter_command
from turnstream_server.bus.pages import entry_ms

FOR_ROOM: Final = "for room"
"""Why a dead letter was discarded that nobody had looked at; stands in its reason."""

_PAGE: Final = 1_000
_EVENTS_PAGE: Final = 32
"""Rejected events of one reply, each with up to MAX_KEPT_BYTES."""

_SLICE: Final = 64


class _Kept(NamedTuple):
    since_ms: int
    num_bytes: int
    discard: Command


async def discard_oldest(client: redis.asyncio.Redis, run: str, *, max_bytes: int) -> int:
    """Discard dead letters of a run, the oldest first, until the others keep `max_bytes` or less.

    Returns:
        How many were discarded now.

    Raises:
        StoreUnavailableError: the store cannot be reached.
    """
    try:
        kept = [*await _letters(client, run), *await _events(client, run)]
    except (RedisError, OSError) as error:
        raise translate(error) from error
    kept.sort(key=lambda each: each.since_ms)
    num_bytes = sum(each.num_bytes for each in kept)
    commands: list[Command] = []
    for each in kept:
        if num_bytes <= max_bytes:
            break
        num_bytes -= each.num_bytes
        commands.append(each.discard)
    num_discarded = 0
    for start in range(0, len(commands), _SLICE):
        replies = await run_commands_async(client, commands[start : start + _SLICE])
        num_discarded += sum(reply == 1 for reply in replies)
    return num_discarded


async def _letters(client: redis.asyncio.Redis, run: str) -> list[_Kept]:
    kept: dict[bytes, _Kept] = {}  # a hash that grows meanwhile gives some fields twice
    name, cursor = keys.run_keys(run).letters, 0
    while True:
        page: Any = await client.execute_command("HSCAN", name, cursor, "COUNT", _PAGE)
        cursor, letters = page
        for trajectory_id, value in letters.items():
            since_ms, num_bytes, _ = value.split(b":")
            discard = discard_letter_command(run, trajectory_id.decode(), why=FOR_ROOM)
            kept[trajectory_id] = _Kept(int(since_ms), int(num_bytes), discard)
        if cursor == 0:
            return [*kept.values()]


async def _events(client: redis.asyncio.Redis, run: str) -> list[_Kept]:
    kept: list[_Kept] = []
    name, start = keys.run_keys(run).damaged, "-"
    while True:
        words = ("XRANGE", name, start, "+", "COUNT", _EVENTS_PAGE)
        entries: Any = await client.execute_command(*words)
        for event_id, fields in entries:
            discard = discard_event_command(run, event_id.decode())
            kept.append(_Kept(entry_ms(event_id.decode()), len(fields[b"r"]), discard))
        if len(entries) < _EVENTS_PAGE:
            return kept
        start = f"({entries[-1][0].decode()}"
