"""Notifying workers of new commands, and waiters of finished requests.

`wakeups` reads the first, `waiting` the second.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import redis
import redis.asyncio

from turnstream.store.client.scripts import run_command_async, run_commands
from turnstream_server.commands.keys import DONE, WAKE
from turnstream_server.commands.request_ids import RequestId
from turnstream_server.commands.writes import essential_write

_WAKE_LENGTH: Final = 1_000
_DONE_LENGTH: Final = 10_000


async def announce(client: redis.asyncio.Redis, news: RequestId | str) -> None:
    """Notify the workers of a model with a new command, or the waiters of a finished request."""
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
