"""Clients of the store for thousands of requests at the same time: few connections, and threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import redis
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError

from turnstream.errors import CorruptRecordError, RecordError, UnknownFormatError
from turnstream.store.client.connection import connect, connect_async
from turnstream.store.client.deadlines import SILENT_S
from turnstream_server.keys.limits import Places

_WAIT_S: Final = 20.0
"""Longest wait of a call for a free connection."""

NUM_THREADS: Final = 8
"""Each has one connection at most."""

_HEAVY_S: Final = 600.0
"""Longest time for which an owner has the turn."""

_Result = TypeVar("_Result")


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
            # The longest unused is next: a reply frees the buffer of a large reply before it.
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


class StoreThreads:
    """The threads of one gateway process, and the client that they share."""

    def __init__(self, url: str) -> None:
        self._client = connect(url, silent_s=SILENT_S)  # connects when it is first used
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="gateway-store")
        self._heavy = asyncio.Semaphore(1)
        self._heavy_places = Places(shared=1, alone=1, held_s=_HEAVY_S)

    async def run(self, work: Callable[[redis.Redis], _Result]) -> _Result:
        """Return the result of a function of the client, which runs in a thread.

        CorruptRecordError for a damaged record, and UnknownFormatError for that of another release.
        """
        return await self._in_thread(lambda: work(self._client))

    async def run_heavy(self, work: Callable[[], _Result], *, owner: str) -> _Result:
        """Return the result of a function that needs much memory; owners run one, in turn."""
        async with self._heavy_places.borrow(owner) as place:
            await place.take()
            async with self._heavy:
                return await self._in_thread(work)

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except (CorruptRecordError, UnknownFormatError):
            raise
        except RecordError as error:  # else it would count as an error of the request
            raise CorruptRecordError(f"the store is damaged: {error}") from error

    async def close(self) -> None:
        """Disconnect, once the running functions have returned."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        self._client.close()
