"""Polls of results: held until the result is there, and through an outage of the store.

One subscription per process wakes any number of polls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, cast

import redis.asyncio

from turnstream.errors import UnavailableError
from turnstream.store.client.replies import translating
from turnstream_server.keys.limits import without_place
from turnstream_server.loops import background, repeat
from turnstream_server.operations.keys import DONE, RequestId, model_keys, sampler_keys
from turnstream_server.operations.results import DROPPED, FETCHED_S, UNFETCHED_S
from turnstream_server.telemetry.instruments import gauge

logger = logging.getLogger(__name__)

_HELD = gauge("turnstream_gateway_held_polls", "Polls of results that are held at present.")

_BLOCK_S: Final = 5.0
_COUNT: Final = 1_000
_MAX_READS: Final = 64
"""Reads at the same time; each has a connection. A notification can wake thousands of polls."""

_LAST_READ_S: Final = 5.0
"""Time for the last read of a poll, after its wait. A silent store needs longer."""


class UnknownRequestError(LookupError):
    """No such request: it was never submitted, or its session has ended and its result is gone."""


class DroppedResultError(LookupError):
    """The request is finished, and its result is not kept any more."""


class Polls:
    """The polls of one process. The listener has its own connection, and is blocked most times."""

    def __init__(self, client: redis.asyncio.Redis, listener: redis.asyncio.Redis) -> None:
        self._client = client
        self._listener = listener
        self._events: dict[str, set[asyncio.Event]] = {}
        self._unread: set[asyncio.Event] = set()  # the last read of these polls failed
        self._held: set[asyncio.Timeout] = set()
        self._position: Any = None
        self._reads = asyncio.Semaphore(_MAX_READS)
        self._is_closed = False

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Notify polls in the block."""
        listening = repeat(self._listen, what="results are not read")
        async with background(listening, name="results"):
            yield

    async def result(
        self, request_id: RequestId, *, hold_s: float, check: Callable[[], Awaitable[None]]
    ) -> bytes | None:
        """Return the stored bytes of a result; None if it is not there after `hold_s`.

        While the store is away, the poll is held too. A client repeats a failed poll at once.
        `check` reads the store, and raises if the caller may not have the result.

        Raises:
            UnknownRequestError: there is no such request.
            DroppedResultError: the result was dropped.
        """
        deadline_s = _now_s() + hold_s
        notified = asyncio.Event()
        events = self._events.setdefault(str(request_id), set())
        events.add(notified)
        try:
            async with asyncio.timeout_at(deadline_s + _LAST_READ_S) as limit:
                self._held.add(limit)
                try:
                    with _HELD.track_inprogress():
                        return await self._until(request_id, check, notified, deadline_s=deadline_s)
                finally:
                    self._held.discard(limit)
        except TimeoutError:
            return None
        finally:
            self._unread.discard(notified)
            events.discard(notified)
            if not events:
                self._events.pop(str(request_id), None)

    def close(self) -> None:
        """End all held polls at once, without a result."""
        self._is_closed = True
        for limit in self._held:
            limit.reschedule(0)

    async def _until(
        self,
        request_id: RequestId,
        check: Callable[[], Awaitable[None]],
        notified: asyncio.Event,
        *,
        deadline_s: float,
    ) -> bytes | None:
        is_checked = False
        while True:
            is_last = self._is_closed or _now_s() >= deadline_s
            notified.clear()
            try:
                if not is_checked:
                    await check()
                    is_checked = True
                found = await self._read(request_id)
            except UnavailableError as error:
                logger.debug("a poll waits for the store: %s", error)
                self._unread.add(notified)
                found = None
            # A cancellation that arrives with a reply of the store is lost: asyncio.wait_for, 3.11.
            if found is not None or is_last or self._is_closed:
                return found
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline_s), without_place():
                    await notified.wait()

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
            times = f"{FETCHED_S:.0f} s after its first fetch, or {UNFETCHED_S:.0f} s without one"
            named = f"the result of request {str(request_id)!r}"
            raise DroppedResultError(f"{named} is deleted: a result is kept for {times}")
        return cast("bytes | None", result)

    async def _listen(self) -> None:
        """Notify the polls of the next entries of the stream of finished requests.

        At the start and after an error all polls read for themselves: entries may be missed. Later
        those do whose last read has failed.
        """
        position: Any = self._position
        self._position = None  # it stays None after an error
        with translating():
            if position is None:
                newest: Any = await self._listener.xrevrange(DONE, count=1)
                position = newest[0][0] if newest else "0"
                self._notify(*self._events)
            for each in self._unread:
                each.set()
            self._unread.clear()
            found: Any = await self._listener.xread(
                {DONE: position}, block=round(_BLOCK_S * 1000), count=_COUNT
            )
        for _, entries in found or ():
            for entry_id, fields in entries:
                position = entry_id
                self._notify(fields.get(b"r", b"").decode())
        self._position = position

    def _notify(self, *request_ids: str) -> None:
        for request_id in request_ids:
            for each in self._events.get(request_id, ()):
                each.set()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
