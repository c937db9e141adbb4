"""A client of the store with few connections, for thousands of requests at the same time."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError

from turnstream.store.client.connection import connect_async

_WAIT_S: Final = 20.0


class _QueuedPool(redis.asyncio.ConnectionPool):
    """A pool whose callers wait in order for a free connection.

    `BlockingConnectionPool` needs its lock to release a connection too. With 2,000 waiting callers
    a release waits behind them all.
    """

    def __init__(self, *, max_connections: int, **settings: Any) -> None:
        super().__init__(max_connections=max_connections, **settings)
        self._free = asyncio.Semaphore(max_connections)
        self._lent: set[Any] = set()

    async def get_connection(self, *arguments: Any, **settings: Any) -> Any:
        """Return a connection, as soon as one is free."""
        try:
            async with asyncio.timeout(_WAIT_S):
                await self._free.acquire()
        except TimeoutError as error:
            message = f"all {self.max_connections} connections were in use for {_WAIT_S:g} s"
            raise RedisConnectionError(message) from error
        try:
            connection = await super().get_connection(*arguments, **settings)
        except BaseException:
            self._free.release()
            raise
        self._lent.add(connection)
        return connection

    async def release(self, connection: Any) -> None:
        """Take a connection back. `get_connection` also releases one that could not connect."""
        try:
            await super().release(connection)
            # The longest unused is lent next: a reply frees the buffer of a large reply before it.
            free = self._available_connections
            if free and free[-1] is connection:
                free.insert(0, free.pop())
        finally:
            if connection in self._lent:
                self._lent.discard(connection)
                self._free.release()


def bounded_client(url: str, *, max_connections: int) -> redis.asyncio.Redis:
    """Return a client like `connect_async` with at most so many connections."""
    pool = connect_async(url).connection_pool
    settings = {**pool.connection_kwargs, "max_connections": max_connections}
    queued = _QueuedPool(connection_class=pool.connection_class, **settings)
    return redis.asyncio.Redis.from_pool(queued)
