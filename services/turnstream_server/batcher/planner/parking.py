"""Parked runs: idle runs without a leader, all watched by one blocking read on one connection.

A run whose planner has nothing to do and nothing to time is parked: its leadership is released, and
the planner waits here. Every call that adds work to a run writes to its `events` or `wake` stream.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, NamedTuple

import redis.asyncio

from turnstream.errors import UnavailableError
from turnstream.store.client import keys
from turnstream.store.client.connection import MAX_BLOCK_S
from turnstream_server.batcher.planner.listener import wait_for_entries
from turnstream_server.ledger.leadership.leadership import Position
from turnstream_server.loops import first_result, repeat

logger = logging.getLogger(__name__)

PARK_AFTER_S: Final = 10.0
"""A run without news for so long is parked. To lead it again costs a replay of its events, which is
about as much CPU time as to lead it idly for 10 s."""

_GATHER_S: Final = 0.05
"""Runs that are parked within this time are added to the read together."""


class _Wait(NamedTuple):
    position: Position
    ended: asyncio.Future[bool]


class ParkedRuns:
    """Wakes the planners of parked runs; the read that waits holds a connection of the client."""

    def __init__(self, client: redis.asyncio.Redis, *, after_s: float = PARK_AFTER_S) -> None:
        self.after_s = after_s
        self._client = client
        self._waits: dict[str, _Wait] = {}
        self._has_more = asyncio.Event()

    async def wait(self, run: str, position: Position) -> bool:
        """Wait until a parked run has entries after `position`, or `wake` is called.

        Returns:
            Whether the run is to be led. False after `wake`: it may be parked again at once.
        """
        wait = _Wait(position, asyncio.get_running_loop().create_future())
        self._waits[run] = wait
        self._has_more.set()
        try:
            return await wait.ended
        finally:
            if self._waits.get(run) is wait:
                del self._waits[run]

    def is_parked(self, run: str) -> bool:
        """Return whether the planner of a run waits here."""
        return run in self._waits

    def wake(self, run: str) -> None:
        """End the wait for a parked run: the store may have lost it, or was restarted."""
        self._end(run, has_news=False)

    async def watch(self) -> None:
        """End waits with news, until cancelled.

        An error of the store loses no news: the next read begins at the same positions. After a
        restart of the store the search for runs wakes every planner, too.
        """
        await repeat(self._watch_once, what="parked runs are not watched")

    async def _watch_once(self) -> None:
        if not self._waits:
            await self._has_more.wait()
        await asyncio.sleep(_GATHER_S)
        self._has_more.clear()
        try:
            runs = await first_result(self._read(), self._wait_for_more())
        except UnavailableError:
            raise
        except Exception:  # a defect of one run must not stop the others: each reads for itself
            logger.exception("the watch of parked runs failed")
            runs = {*self._waits}
        for run in runs:
            self._end(run, has_news=True)

    async def _read(self) -> set[str]:
        """Return the parked runs with entries after their position; none after MAX_BLOCK_S."""
        streams: dict[bytes, str] = {}
        runs: dict[bytes, str] = {}
        for run, wait in self._waits.items():
            names = keys.run_keys(run)
            events, wake = names.events.encode(), names.wake.encode()
            streams |= {events: wait.position.event_id, wake: wait.position.wake_id}
            runs |= {events: run, wake: run}
        if not streams:
            return set()
        found = await wait_for_entries(self._client, streams, count=1, wait_s=MAX_BLOCK_S)
        return {runs[stream] for stream in found}

    async def _wait_for_more(self) -> set[str]:
        await self._has_more.wait()
        return set()

    def _end(self, run: str, *, has_news: bool) -> None:
        wait = self._waits.pop(run, None)
        if wait is not None and not wait.ended.done():
            wait.ended.set_result(has_news)
