"""Polls of results: held until the result is there, and through an outage of the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import redis.asyncio

from turnstream.errors import UnavailableError
from turnstream_server.keys.places import without_place
from turnstream_server.operations.bases import read_bases
from turnstream_server.operations.request_ids import RequestId
from turnstream_server.operations.waiting import ResultWaiter
from turnstream_server.telemetry.instruments import gauge

logger = logging.getLogger(__name__)

_HELD = gauge("turnstream_gateway_held_polls", "Polls of results that are held at present.")

_PROBE_S: Final = 0.5
_LAST_READ_S: Final = 5.0
"""Time for the last read of a poll, after its wait. A silent store needs longer."""


class Polls:
    """The polls of one process.

    Args:
        client: the store.
        waiter: waits for results.
        hold_s: longest time for which a poll is held.
    """

    def __init__(self, client: redis.asyncio.Redis, waiter: ResultWaiter, *, hold_s: float) -> None:
        self._client = client
        self._waiter = waiter
        self._hold_s = hold_s
        self._held: set[asyncio.Timeout] = set()
        self._outage: asyncio.Task[None] | None = None
        self._is_closed = False

    async def result(
        self, request_id: RequestId, *, check: Callable[[], Awaitable[None]]
    ) -> bytes | None:
        """Return the stored bytes of a result; None if it is not there after `hold_s`.

        While the store is away, the poll is held too. A client repeats a failed poll at once.

        Args:
            request_id: the request.
            check: reads the store, and raises if the caller may not have the result.

        Raises:
            UnknownRequestError, DroppedResultError: as of `ResultWaiter.result`.
        """
        deadline_s = asyncio.get_running_loop().time() + self._hold_s
        try:
            async with asyncio.timeout_at(deadline_s + _LAST_READ_S) as limit:
                self._held.add(limit)
                try:
                    with _HELD.track_inprogress():
                        return await self._until(request_id, check, deadline_s=deadline_s)
                finally:
                    self._held.discard(limit)
        except TimeoutError:
            return None

    def close(self) -> None:
        """End all held polls at once, without a result."""
        self._is_closed = True
        for limit in self._held:
            limit.reschedule(0)
        if self._outage is not None:
            self._outage.cancel()

    async def _until(
        self, request_id: RequestId, check: Callable[[], Awaitable[None]], *, deadline_s: float
    ) -> bytes | None:
        clock = asyncio.get_running_loop().time
        is_checked = False
        while True:
            left_s = 0 if self._is_closed else max(0.0, deadline_s - clock())
            try:
                if not is_checked:
                    await check()
                    is_checked = True
                return await self._waiter.result(request_id, timeout_s=left_s, idle=without_place)
            except UnavailableError as error:
                if not left_s:
                    return None
                logger.debug("a poll waits for the store: %s", error)
            async with asyncio.timeout_at(deadline_s), without_place():
                await asyncio.shield(self._until_back())

    def _until_back(self) -> asyncio.Task[None]:
        """Return a task that ends when the store answers; all polls share it."""
        if self._outage is None or self._outage.done():
            self._outage = asyncio.create_task(self._probe())
        return self._outage

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(_PROBE_S)
            try:
                await read_bases(self._client)
            except UnavailableError:
                continue
            return
