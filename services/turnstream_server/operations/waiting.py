"""Reading results, and waiting for them: one subscription per process for any number of waiters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, cast

import redis.asyncio

from turnstream.store.client.replies import translating
from turnstream_server.loops import background, repeat
from turnstream_server.operations.kept_results import FETCHED_S, UNFETCHED_S
from turnstream_server.operations.keys import DONE, model_keys, sampler_keys
from turnstream_server.operations.request_ids import RequestId
from turnstream_server.operations.results import DROPPED

_BLOCK_S: Final = 5.0
_COUNT: Final = 1_000
_MAX_READS: Final = 64
"""Reads at the same time; each has a connection. A notification can wake thousands of waiters."""


class UnknownRequestError(LookupError):
    """No such request: it was never submitted, or its session has ended and its result is gone."""


class DroppedResultError(LookupError):
    """The request is finished, and its result is not kept any more."""


class ResultWaiter:
    """Waits for results in one process.

    Args:
        client: the store. Results are read by it.
        waiting: a client of its own connection, which is blocked most of the time.
    """

    def __init__(self, client: redis.asyncio.Redis, waiting: redis.asyncio.Redis) -> None:
        self._client = client
        self._waiting = waiting
        self._waiters: dict[str, set[asyncio.Event]] = {}
        self._position: Any = None
        self._reads = asyncio.Semaphore(_MAX_READS)

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Notify waiters in the block."""
        listening = repeat(self._listen, what="results are not read")
        async with background(listening, name="results"):
            yield

    async def result(
        self,
        request_id: RequestId,
        *,
        timeout_s: float,
        idle: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext,
    ) -> bytes | None:
        """Return the stored bytes of a result; None if it is not there after `timeout_s`.

        Args:
            request_id: the request.
            timeout_s: longest wait.
            idle: makes a context in which the call waits and does nothing else.

        Raises:
            UnknownRequestError: there is no such request.
            DroppedResultError: the result was dropped.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        notified = asyncio.Event()
        waiters = self._waiters.setdefault(str(request_id), set())
        waiters.add(notified)
        try:
            while True:
                notified.clear()
                if (found := await self._read(request_id)) is not None:
                    return found
                try:
                    async with asyncio.timeout_at(deadline_s), idle():
                        await notified.wait()
                except TimeoutError:
                    return await self._read(request_id)
        finally:
            waiters.discard(notified)
            if not waiters:
                self._waiters.pop(str(request_id), None)

    async def _read(self, request_id: RequestId) -> bytes | None:
        if request_id.is_sample:
            keys = sampler_keys(request_id.target)
            submitted, results = keys.samples, keys.results
        else:
            of_model = model_keys(request_id.target)
            submitted, results = of_model.commands, of_model.results
        field = str(request_id.number)
        async with self._reads:
            with translating():
                pipeline = self._client.pipeline(transaction=False)
                # The result is last: hiredis keeps its buffer while a short reply is behind it.
                pipeline.hexists(submitted, field)
                pipeline.hget(results, field)
                is_known, result = await pipeline.execute()
        if result is None and not is_known:
            raise UnknownRequestError(f"there is no request {str(request_id)!r}")
        if result == DROPPED:
            raise DroppedResultError(_dropped_text(request_id))
        return cast("bytes | None", result)

    async def _listen(self) -> None:
        """Read the next entries of the stream of finished requests.

        At the start and after an error all waiters read for themselves: entries may be missed.
        """
        position, self._position = self._position, None  # it stays None after an error
        with translating():
            if position is None:
                position = await self._newest()
                self._notify(*self._waiters)
            self._position = await self._read_from(position)

    async def _newest(self) -> Any:
        newest = await self._waiting.xrevrange(DONE, count=1)
        return newest[0][0] if newest else "0"

    async def _read_from(self, position: Any) -> Any:
        """Notify the waiters of the next entries; return the position after them."""
        block_ms = round(_BLOCK_S * 1000)
        found: Any = await self._waiting.xread({DONE: position}, block=block_ms, count=_COUNT)
        for _, entries in found or ():
            for entry_id, fields in entries:
                position = entry_id
                self._notify(fields.get(b"r", b"").decode())
        return position

    def _notify(self, *request_ids: str) -> None:
        for request_id in request_ids:
            for each in self._waiters.get(request_id, ()):
                each.set()


def _dropped_text(request_id: RequestId) -> str:
    times = f"{FETCHED_S:.0f} s after its first fetch, or {UNFETCHED_S:.0f} s without one"
    return f"the result of request {str(request_id)!r} is deleted: a result is kept for {times}"
