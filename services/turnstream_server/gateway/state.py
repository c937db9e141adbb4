"""State of a gateway process: clients of the store, held polls, and records that do not change.

Thousands of requests at the same time share few connections, and threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import redis
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError

from turnstream.errors import (
    BatchingError,
    CorruptRecordError,
    NotReadyError,
    RecordError,
    UnknownFormatError,
)
from turnstream.store.client.connection import connect, connect_async
from turnstream.store.client.deadlines import SILENT_S
from turnstream_server.gateway.bodies import Parsers
from turnstream_server.gateway.config import GatewayOptions
from turnstream_server.gateway.polls import Polls
from turnstream_server.gateway.stream_waits import StreamWaits
from turnstream_server.keys.limits import Places, TokenBucket
from turnstream_server.keys.records import KeyChecks
from turnstream_server.keys.sessions import SessionKeys
from turnstream_server.operations.models import BaseModel, ModelRecord, read_bases

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


DENSE_BYTES_PER_S: Final = 32 << 20
"""Bytes that an owner may make of sparse rows, which have few bytes for any shape."""

_REFRESH_S: Final = 5.0
_MAX_KNOWN: Final = 20_000

_Value = TypeVar("_Value")


class BaseModels:
    """The base models of the workers. One that was registered once stays known."""

    def __init__(self, threads: StoreThreads) -> None:
        self._threads = threads
        self._known: dict[str, BaseModel] = {}
        self._read_s = -_REFRESH_S

    async def served(self) -> Mapping[str, BaseModel]:
        """Return the names of the served base models, each with its model."""
        return await self._threads.run(read_bases)

    async def require_served(self, name: str) -> BaseModel:
        """Return a served base model; BatchingError lists the names of all if it is not served."""
        served = await self.served()
        if name not in served:
            names = ", ".join(served) or "none"
            raise BatchingError(f"base_model is {name!r}, which is not served; served: {names}")
        return served[name]

    async def known(self, name: str) -> BaseModel:
        """Return a base model whose workers may be away; NotReadyError if it never had any."""
        if name not in self._known or time.monotonic() - self._read_s >= _REFRESH_S:
            known = functools.partial(read_bases, is_served=False)
            self._known = await self._threads.run(known)
            self._read_s = time.monotonic()
        if name not in self._known:
            raise NotReadyError(f"no worker has registered base model {name!r}")
        return self._known[name]

    async def find(self, name: str) -> BaseModel | None:
        """Return a base model, or None if it is not known."""
        try:
            return await self.known(name)
        except NotReadyError:
            return None


class Gateway:
    """State of one gateway process.

    Attributes:
        options: its settings.
        client: the store.
        polls: the held polls.
        bases: the served base models.
        keys: checks of the keys of requests.
        sessions: makes and checks session keys.
        closing: callbacks that end held requests; closed before the last request.
        threads: calls of the store that block.
        streams: waits for new entries of streams.
        parsers: threads and processes that parse bodies.
        models: known models. Their `last_request_ms` and `ended` may be old.
        sampler_owners: the owner of each known sampling session.
        resources: resources of routes, kept until the process ends; closed after the last request.
    """

    def __init__(self, options: GatewayOptions, client: redis.asyncio.Redis, polls: Polls) -> None:
        self.options = options
        self.client = client
        self.polls = polls
        self.keys = KeyChecks(client, requires_key=options.requires_key)
        self.sessions = SessionKeys(client, self.keys)
        self.closing = contextlib.AsyncExitStack()
        self.resources = contextlib.AsyncExitStack()
        self.threads = StoreThreads(options.redis_url)
        self.resources.push_async_callback(self.threads.close)
        self.bases = BaseModels(self.threads)
        self.streams = StreamWaits(options.redis_url)
        self.resources.push_async_callback(self.streams.stop)
        self.closing.callback(self.streams.close)
        self.parsers = Parsers()
        self.resources.push_async_callback(self.parsers.close)
        self.models: dict[str, ModelRecord] = {}
        self.sampler_owners: dict[str, str] = {}
        self._dense: dict[str, TokenBucket] = {}

    def admit_dense(self, owner: str, num_bytes: int) -> float:
        """Count bytes that a call makes of sparse rows; return the seconds until they fit, or 0.

        They are made before they are counted; `parsers` limits the calls of an owner in work.
        """
        now_s = time.monotonic()
        bucket = self._dense.get(owner) or TokenBucket(DENSE_BYTES_PER_S, now_s=now_s)
        keep(self._dense, owner, bucket)
        wait_s = bucket.missing_s(num_bytes, now_s=now_s)
        if not wait_s:
            bucket.take(num_bytes)
        return wait_s


def session_of(target: str) -> str:
    """Return the id of the session of a model or sampling session."""
    return target.partition(":")[0]


def keep(known: dict[str, _Value], name: str, value: _Value) -> None:
    """Remember a value; all are dropped once there are too many."""
    if len(known) >= _MAX_KNOWN:
        known.clear()
    known[name] = value
