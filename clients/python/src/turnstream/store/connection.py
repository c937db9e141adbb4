"""Clients of the store: raw bytes in both directions, RESP2, no reply waited for without end."""

from __future__ import annotations

import asyncio
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ResponseError
from redis.retry import Retry

SOCKET_TIMEOUT_S = 30.0
"""A server that is silent for so long counts as away."""

MAX_BLOCK_S = 10.0
"""Longest blocking read: well below SOCKET_TIMEOUT_S, which would end the connection."""

NUM_RETRIES = 3
"""Of a command whose connection failed, as after a restart of the server. All we send is safe to
send twice."""

MAX_CONNECTIONS = 10_000
"""Of one client: the server's own default bound. A batcher holds a connection for every run that it
follows, and a client of redis-py refuses the hundred and first otherwise."""

_CONNECT_TIMEOUT_S = 5.0
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5


def connect(url: str, *, num_retries: int = NUM_RETRIES) -> redis.Redis:
    """A client for `redis://`, `rediss://` or `unix://`; it connects when it is first used."""
    backoff = ExponentialBackoff(cap=_LONGEST_PAUSE_S, base=_FIRST_PAUSE_S)
    return redis.Redis.from_url(url, retry=Retry(backoff, num_retries), **_options())


def connect_async(url: str, *, num_retries: int = NUM_RETRIES) -> redis.asyncio.Redis:
    """The same as `connect`, for asyncio."""
    backoff = ExponentialBackoff(cap=_LONGEST_PAUSE_S, base=_FIRST_PAUSE_S)
    retry = redis.asyncio.retry.Retry(backoff, num_retries)
    return redis.asyncio.Redis.from_url(url, retry=retry, **_options())


def _options() -> dict[str, Any]:
    return {
        "decode_responses": False,
        "max_connections": MAX_CONNECTIONS,
        "protocol": 2,
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": _CONNECT_TIMEOUT_S,
    }


class Link:
    """One connection on which many commands travel at once, and which never repeats any itself.

    It connects when it is first used, and again after it was lost.
    """

    def __init__(self, url: str) -> None:
        pool = redis.ConnectionPool.from_url(url, **_options())
        self._connection = pool.make_connection()

    @property
    def is_connected(self) -> bool:
        """Whether the next exchange finds the connection of the last one."""
        return self._connection.is_connected

    def connect(self) -> None:
        """Connect, where that is not so already.

        Raises:
            redis.RedisError, OSError: no server answers, or it refuses us.
        """
        self._connection.connect()

    def exchange(self, data: bytes, num_replies: int) -> list[Any]:
        """Send packed commands and give their replies in order, error replies among them.

        Raises:
            redis.RedisError, OSError: the connection was lost. Nothing is known of any command.
        """
        replies: list[Any] = []
        try:
            self._connection.send_packed_command([data], check_health=False)
            while len(replies) < num_replies:
                try:
                    replies.append(self._connection.read_response())
                except ResponseError as error:
                    replies.append(error)
        except BaseException:
            self.close()  # whoever comes next must not read what was left of this exchange
            raise
        return replies

    def close(self) -> None:
        """Disconnect. Safe to repeat, and from another thread, where it ends an exchange."""
        self._connection.disconnect()


class AsyncLink:
    """The same as Link, for asyncio."""

    def __init__(self, url: str) -> None:
        # One deadline per exchange: the client's own would cost a timer for every reply.
        options = {**_options(), "socket_timeout": None}
        pool = redis.asyncio.ConnectionPool.from_url(url, **options)
        self._connection = pool.make_connection()

    @property
    def is_connected(self) -> bool:
        """Whether the next exchange finds the connection of the last one."""
        return self._connection.is_connected

    async def connect(self) -> None:
        """Connect, where that is not so already.

        Raises:
            redis.RedisError, OSError: no server answers, or it refuses us.
        """
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            await self._connection.connect()

    async def exchange(self, data: bytes, num_replies: int) -> list[Any]:
        """Send packed commands and give their replies in order, error replies among them.

        Raises:
            redis.RedisError, OSError: the connection was lost. Nothing is known of any command.
        """
        replies: list[Any] = []
        try:
            async with asyncio.timeout(SOCKET_TIMEOUT_S):
                await self._connection.send_packed_command([data], check_health=False)
                while len(replies) < num_replies:
                    try:
                        replies.append(await self._connection.read_response())
                    except ResponseError as error:
                        replies.append(error)
        except BaseException:
            await self.close()  # whoever comes next must not read what was left of this exchange
            raise
        return replies

    async def close(self) -> None:
        """Disconnect. Safe to repeat."""
        await self._connection.disconnect(nowait=True)
