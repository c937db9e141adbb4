"""News of runs as they happen: one blocking read of everything that a planner waits for.

A run whose planner has nothing to do and nothing to time is parked: its leadership is released, and
all parked runs are watched by one read on one connection. Every call that adds work to a run writes
to its `events` or `wake` stream.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import redis.asyncio

from turnstream.errors import UnavailableError
from turnstream.store.client import keys
from turnstream.store.client.connection import MAX_BLOCK_S
from turnstream.store.client.replies import translating
from turnstream_server.ledger.core.scan import EventEntry, event_entry, read_events_async
from turnstream_server.ledger.leadership.writes import Position
from turnstream_server.loops import first_result, repeat

logger = logging.getLogger(__name__)

WAKE_EVENTS: Final = 8
"""Events in the reply of a read that waits, at most: only then their bytes are not bounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """The changes since the last read.

    Attributes:
        events: new ones, in order; if there are WAKE_EVENTS or more, others may follow.
        is_frontier_old: a batch was planned or stepped, a session began, the run was closed, or
            groups were dropped.
    """

    events: list[EventEntry]
    is_frontier_old: bool


class RunListener:
    """Reads the streams of a run from its last position; the events from the first one on."""

    def __init__(self, client: redis.asyncio.Redis, run: str, *, after_step: int) -> None:
        names = keys.run_keys(run)
        self._client = client
        self._run = run
        self._events = names.events.encode()
        # The last wake entry is read once more, so that nothing between is missed.
        self._signals = {names.wake.encode(): "0-0", names.plan.encode(): f"{after_step}-0"}
        self._plan, self._wake = names.plan.encode(), names.wake.encode()
        self._last_event = "0-0"

    @property
    def position(self) -> str:
        """Id of the last event that was read; "0-0" before the first."""
        return self._last_event

    @property
    def wake_id(self) -> str:
        """Id of the last entry of the wake stream that was read; "0-0" before the first."""
        return self._signals[self._wake]

    def start_after(self, event_id: str) -> None:
        """Read the events after this one: the caller knows the earlier ones."""
        self._last_event = event_id

    def pass_step(self, step: int) -> None:
        """Do not report the plan of this step: the caller has written it."""
        self._signals[self._plan] = f"{step}-0"

    def fall_back(self, step: int) -> None:
        """Report the plans after this step again: those that were read are withdrawn."""
        if int(self._signals[self._plan].partition("-")[0]) > step:
            self.pass_step(step)

    async def read_events(self) -> list[EventEntry]:
        """Return the next stored events, at most one slice of them."""
        events = await read_events_async(self._client, self._run, after=self._last_event)
        if events:
            self._last_event = events[-1].event_id
        return events

    async def wait(self, *, with_events: bool, wait_s: float = MAX_BLOCK_S) -> News:
        """Return the changes, or none after `wait_s`, which is at most MAX_BLOCK_S."""
        streams = dict(self._signals)
        if with_events:
            streams[self._events] = self._last_event
        wait_s = min(wait_s, MAX_BLOCK_S)
        found = await wait_for_entries(self._client, streams, count=WAKE_EVENTS, wait_s=wait_s)
        new_events = found.pop(self._events, [])
        events = [event_entry(event_id, fields) for event_id, fields in new_events]
        if events:
            self._last_event = events[-1].event_id
        for stream, entries in found.items():
            self._signals[stream] = entries[-1][0].decode()
        if len(events) == WAKE_EVENTS:
            events += await self.read_events()
        return News(events=events, is_frontier_old=bool(found))


async def wait_for_entries(
    client: redis.asyncio.Redis, streams: dict[bytes, str], *, count: int, wait_s: float
) -> dict[bytes, Any]:
    """Return the entries of streams after these ids; none after `wait_s`."""
    block_ms = max(1, round(wait_s * 1000))  # BLOCK 0 would never time out
    words = ("XREAD", "COUNT", count, "BLOCK", block_ms, "STREAMS", *streams, *streams.values())
    with translating():
        reply: Any = await client.execute_command(*words)
    return dict(reply or ())


COMPACT_SLICE: Final = 100
"""Weight of the events that are folded before the event loop runs other tasks: about 2 ms."""

BYTES_PER_WEIGHT: Final = 300
"""Bytes of an event's record that weigh as much as another event."""


class LoopShare:
    """Yields to other tasks after each slice of folded events, by their number and bytes."""

    def __init__(self) -> None:
        self._weight = 0.0

    async def after(self, entry: EventEntry) -> None:
        """Count an event; yield to the event loop at the end of a slice."""
        self._weight += 1 + len(entry.record) / BYTES_PER_WEIGHT
        if self._weight >= COMPACT_SLICE:
            self._weight = 0.0
            await asyncio.sleep(0)


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
