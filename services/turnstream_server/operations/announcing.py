"""Single writes that the store accepts also when it is full, and the notifications by them.

Without them a full store would stay full: results need to be announced before their commands are
covered, and the sessions of living clients would be closed. Workers are notified of new operations,
and waiters of finished requests and sessions. `Wakeups` reads both in threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, cast

import redis
import redis.asyncio

from turnstream.store.client.connection import MAX_BLOCK_S
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import (
    Argument,
    Command,
    Script,
    run_command_async,
    run_commands,
)
from turnstream_server.operations.keys import DONE, WAKE, RequestId

_WRITE: Final = Script("essential_write", "turnstream_server.operations")


def essential_write(name: str, key: str, *words: Argument) -> Command:
    """Return a command with one key, for `run_command`; nothing is sent.

    >>> essential_write("HSET", "tm:bases", "tiny", "{}").args
    ('HSET', 'tiny', '{}')
    """
    return Command(_WRITE, (key,), (name, *words))


_WAKE_LENGTH: Final = 1_000
_DONE_LENGTH: Final = 10_000
_COUNT: Final = 1_000
_FIELDS: Final = {WAKE: b"m", DONE: b"r"}


async def announce(client: redis.asyncio.Redis, news: RequestId | str) -> None:
    """Notify the workers of a model with a new operation, or the waiters of a finished request."""
    if isinstance(news, RequestId):
        await client.xadd(DONE, {"r": str(news)}, maxlen=_DONE_LENGTH, approximate=True)
    else:
        await client.xadd(WAKE, {"m": news}, maxlen=_WAKE_LENGTH, approximate=True)


async def announce_end(client: redis.asyncio.Redis, session_id: str) -> None:
    """Notify the samplers of the end of a session, also while the store is full."""
    length = ("MAXLEN", "~", _DONE_LENGTH, "*", "r")
    await run_command_async(client, essential_write("XADD", DONE, *length, session_id))


def announce_finished(client: redis.Redis, requests: Iterable[RequestId]) -> None:
    """Notify the waiters of finished requests, also while the store is full."""
    length = ("MAXLEN", "~", _DONE_LENGTH, "*", "r")
    commands = [essential_write("XADD", DONE, *length, str(each)) for each in requests]
    for reply in run_commands(client, commands):
        if isinstance(reply, Exception):
            raise reply


class Wakeups:
    """One of the streams WAKE and DONE, from its newest entry at the first read.

    Entries are missed while the store is away: look at everything from time to time too.
    """

    def __init__(self, client: redis.Redis, stream: str = WAKE) -> None:
        self._client = client
        self._stream = stream
        self._position: Any = None

    def read(self, *, block_s: float) -> set[str]:
        """Return the ids of new entries; wait at most `block_s` for the first one."""
        wait_ms = round(min(block_s, MAX_BLOCK_S) * 1000) or None  # 0 would wait without end
        with translating():
            if self._position is None:
                newest: Any = self._client.xrevrange(self._stream, count=1)
                self._position = newest[0][0] if newest else "0"
            found = cast(
                "list[Any]",
                self._client.xread({self._stream: self._position}, block=wait_ms, count=_COUNT),
            )
        ids: set[str] = set()
        for _, entries in found or ():
            for entry_id, fields in entries:
                self._position = entry_id
                ids.add(fields.get(_FIELDS[self._stream], b"").decode())
        return ids
