"""Clients of the store: raw bytes in both directions, RESP2, no reply waited for without end.

An object with connections or threads belongs to one process (`OwnProcess`).
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
from collections.abc import Callable, Collection
from typing import Any, Final, NoReturn

import redis
import redis.asyncio
import redis.asyncio.client
import redis.asyncio.connection
import redis.asyncio.retry
from redis.backoff import ExponentialBackoff
from redis.connection import HiredisRespSerializer
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.retry import Retry

from turnstream.errors import RejectedError
from turnstream.store.client.deadlines import CONNECT_TIMEOUT_S, SILENT_S, SOCKET_TIMEOUT_S
from turnstream.store.client.server_checks import SYNCS, checking, checking_async

MAX_BLOCK_S = 10.0
"""Longest blocking read: well below SOCKET_TIMEOUT_S, which would end the connection."""

NUM_RETRIES = 3
"""Retries of a command after a lost connection, for example a restart of the server. Every command
is safe to repeat. A silent server is not asked again."""

MAX_CONNECTIONS = 10_000
"""Connections of one client: the server's own default limit. A batcher holds one for every run that
it follows, and a client of redis-py refuses the hundred and first otherwise."""

_PART_BYTES: Final = 1 << 18
"""Bytes of an exchange after which its progress is noted."""

_UNSENT_BYTES: Final = 1 << 18
"""Bytes that the system may hold unsent for a connection: the rest of an exchange after its last
part must arrive within the time limit of an answer."""

_PORT = 6379
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5


def connect(
    url: str,
    *,
    num_retries: int = NUM_RETRIES,
    silent_s: float = SOCKET_TIMEOUT_S,
    syncs: Collection[str] = SYNCS,
) -> redis.Redis:
    """Return a client for `redis://`, `rediss://` or `unix://`, which connects at its first use.

    A server counts as away after `silent_s` without an answer. Each connection refuses a server
    that would lose acknowledged writes: see server_checks.py.
    """
    backoff = ExponentialBackoff(cap=_LONGEST_PAUSE_S, base=_FIRST_PAUSE_S)
    retry = Retry(backoff, num_retries, supported_errors=(RedisConnectionError,))
    return redis.Redis.from_pool(_pool(url, retry=retry, socket_timeout=silent_s, syncs=syncs))


def connect_for_calls(url: str) -> redis.Redis:
    """Return a client for short calls, which end after SILENT_S without an answer."""
    return connect(url, silent_s=SILENT_S)


def limited_client(client: redis.Redis, *, timeout_s: float) -> redis.Redis:
    """Return a client of the same store that waits at most `timeout_s` for an answer."""
    pool = client.connection_pool
    limits = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    options = {**pool.connection_kwargs, **limits}
    return redis.Redis.from_pool(redis.ConnectionPool(pool.connection_class, **options))


def connect_async(url: str, *, num_retries: int = NUM_RETRIES) -> redis.asyncio.Redis:
    """Return a client like `connect`, for asyncio."""
    backoff = ExponentialBackoff(cap=_LONGEST_PAUSE_S, base=_FIRST_PAUSE_S)
    errors = (RedisConnectionError,)
    retry = redis.asyncio.retry.Retry(backoff, num_retries, supported_errors=errors)
    return _AsyncClient.from_pool(_async_pool(url, retry=retry))


def address_of_client(client: redis.Redis | redis.asyncio.Redis) -> str:
    """Return the address of a client's store."""
    options = client.connection_pool.connection_kwargs
    return options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', _PORT)}"


def _pool(url: str, *, syncs: Collection[str] = SYNCS, **options: Any) -> redis.ConnectionPool:
    settings = {**_options(), **options}
    return redis.ConnectionPool.from_url(url, redis_connect_func=checking(syncs), **settings)


def _async_pool(url: str, **options: Any) -> redis.asyncio.ConnectionPool:
    settings = {**_options(), **options}
    check = checking_async()
    return _AsyncPool.from_url(url, redis_connect_func=check, **settings)


class _AsyncClient(redis.asyncio.Redis):
    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Any:
        """Return a pipeline."""
        kind = redis.asyncio.client.Pipeline if transaction else _LeanPipeline
        return kind(self.connection_pool, self.response_callbacks, transaction, shard_hint)


class _LeanPipeline(redis.asyncio.client.Pipeline):
    """Commands of one round trip: its end needs no task, because `_AsyncPool` does not wait."""

    async def reset(self) -> None:
        """Release the connection."""
        self.command_stack = []
        connection, self.connection = self.connection, None
        if connection is not None:
            await self.connection_pool.release(connection)


class _AsyncPool(redis.asyncio.ConnectionPool):
    """A pool whose calls need a third of the CPU time of redis-py's.

    Locks, events and checks of redis-py serve features that are not used here.
    """

    def __init__(self, connection_class: type[Any] = redis.asyncio.Connection, **options: Any):
        super().__init__(connection_class=_lean(connection_class), **options)

    async def get_connection(self, *args: Any, **options: Any) -> Any:
        """Return a connection that is connected and has no unread reply."""
        connection = self.get_available_connection()
        try:
            await self.ensure_connection(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection

    async def release(self, connection: Any) -> None:
        """Make a connection available to the next call."""
        self._in_use_connections.remove(connection)
        self._available_connections.append(connection)


@functools.cache
def _lean(kind: type[Any]) -> type[Any]:
    return type(f"Lean{kind.__name__}", (_LeanConnection, kind), {})


class _LeanConnection(redis.asyncio.connection.AbstractConnection):
    """Packs with hiredis, and sends without a task and a timer if the system takes all bytes."""

    _writer: Any

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.pack_command: Any = HiredisRespSerializer().pack

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Send packed commands."""
        if self.is_connected and not self._writer.is_closing():
            self._writer.writelines(command)
            if not self._writer.transport.get_write_buffer_size():
                return
            # They are written: wait until they are sent. A PING now would read their reply.
            command, check_health = (), False
        await super().send_packed_command(command, check_health=check_health)


def _options() -> dict[str, Any]:
    return {
        "decode_responses": False,
        "max_connections": MAX_CONNECTIONS,
        "protocol": 2,
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
    }


_SAME_LIMIT_S: Final = 0.05
"""Changes of a time limit that are not worth a new timer."""


class Link:
    """One connection for many commands at once; it never repeats any, and reconnects when used."""

    def __init__(self, url: str) -> None:
        self._connection = _pool(url).make_connection()

    def exchange(self, data: bytes, num_replies: int) -> list[Any]:
        """Send packed commands and return their replies in order, error replies among them."""
        replies: list[Any] = []
        try:
            self._connection.send_packed_command([data], check_health=False)
            while len(replies) < num_replies:
                try:
                    replies.append(self._connection.read_response())
                except ResponseError as error:
                    replies.append(error)
        except BaseException:
            self.close()  # the next exchange must not read replies of this one
            raise
        return replies

    def close(self) -> None:
        """Disconnect. Safe to repeat, and from another thread, where it ends an exchange."""
        self._connection.disconnect()


class AsyncLink:
    """A Link for asyncio."""

    def __init__(self, url: str) -> None:
        # One deadline per exchange: the client's own would cost a timer for every reply.
        options: dict[str, Any] = {"socket_timeout": None}
        if url.startswith("redis") and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            unsent = {socket.TCP_NOTSENT_LOWAT: _UNSENT_BYTES}
            options |= {"socket_keepalive": True, "socket_keepalive_options": unsent}
        self._connection = _async_pool(url, **options).make_connection()

    async def exchange(
        self,
        data: bytes,
        num_replies: int,
        *,
        timeout_s: float = SOCKET_TIMEOUT_S,
        on_sent: Callable[[], float] | None = None,
    ) -> list[Any]:
        """Send packed commands like `Link.exchange`; a cancellation closes the connection.

        `on_sent` is called after each part and returns the time limit from then on, so that
        a slow link has time for many bytes.
        """
        replies: list[Any] = []
        try:
            async with asyncio.timeout(timeout_s) as limit:
                if on_sent is None:
                    await self._connection.send_packed_command([data], check_health=False)
                else:
                    await self._send_parts(data, limit, on_sent=on_sent)
                while len(replies) < num_replies:
                    try:
                        replies.append(await self._connection.read_response())
                    except ResponseError as error:
                        replies.append(error)
        except BaseException:
            await self.close()  # the next exchange must not read replies of this one
            raise
        return replies

    async def _send_parts(
        self, data: bytes, limit: asyncio.Timeout, *, on_sent: Callable[[], float]
    ) -> None:
        now_s = asyncio.get_running_loop().time
        for start in range(0, len(data), _PART_BYTES):
            part = data[start : start + _PART_BYTES]
            await self._connection.send_packed_command([part], check_health=False)
            ends_s, known_s = now_s() + on_sent(), limit.when()
            if known_s is None or abs(ends_s - known_s) > _SAME_LIMIT_S:
                limit.reschedule(ends_s)

    async def close(self) -> None:
        """Disconnect. Safe to repeat."""
        await self._connection.disconnect(nowait=True)


class OwnProcess:
    """The process that made `what`, which alone may use it: threads do not survive `fork`.

    The `remedy` tells how another process gets one of its own.
    """

    __slots__ = ("_pid", "_remedy", "_what")

    def __init__(self, what: str, *, remedy: str) -> None:
        self._pid = os.getpid()
        self._what = what
        self._remedy = remedy

    @property
    def is_here(self) -> bool:
        """Whether this is the process that made the object."""
        return os.getpid() == self._pid

    def require(self) -> None:
        """Raise RejectedError in a process that was forked later."""
        if not self.is_here:
            raise RejectedError(
                f"{self._what} belongs to process {self._pid}, and cannot be used in process "
                f"{os.getpid()}, which was forked from it: {self._remedy}"
            )

    def refuse_pickle(self) -> NoReturn:
        """Raise the TypeError of an object that cannot be pickled."""
        raise TypeError(f"{self._what} cannot be pickled: {self._remedy}")
