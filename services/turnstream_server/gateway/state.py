"""State of a gateway process: clients of the store, held polls, and records that do not change."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping
from typing import Final, TypeVar

import redis.asyncio

from turnstream.errors import BatchingError, NotReadyError
from turnstream_server.gateway.bodies import Parsers
from turnstream_server.gateway.config import GatewayOptions
from turnstream_server.gateway.polls import Polls
from turnstream_server.gateway.store_clients import StoreThreads
from turnstream_server.gateway.stream_waits import StreamWaits
from turnstream_server.keys.limits import TokenBucket
from turnstream_server.keys.records import KeyChecks
from turnstream_server.operations.bases import BaseModel, read_bases
from turnstream_server.operations.models import ModelRecord

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
