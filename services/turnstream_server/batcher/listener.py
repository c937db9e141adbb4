"""News of a run as it happens: one blocking read of everything that a planner waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import redis.asyncio
from redis.exceptions import RedisError

from turnstream.store import keys
from turnstream.store.connection import MAX_BLOCK_S
from turnstream.store.replies import translate

PAGE_EVENTS: Final = 400
"""Events of one reply, which costs as much as fifty of them."""


class EventEntry(NamedTuple):
    """An event as it is stored.

    Attributes:
        posted_for: id of the trajectory that a generator posted it for; empty where none did.
    """

    event_id: str
    record: bytes
    posted_for: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What has happened since the last read.

    Attributes:
        events: that are new, in order, at most PAGE_EVENTS.
        is_frontier_old: a batch was planned or stepped, a session began, the run was closed, or
            groups were dropped.
    """

    events: list[EventEntry]
    is_frontier_old: bool


class RunListener:
    """Reads the streams of a run from where it stopped; the events from the first one on.

    Args:
        client: of the store; a connection of its pool is held during every read that waits.
        run: name of the run.
        after_step: the newest plan that is known already.
    """

    def __init__(self, client: redis.asyncio.Redis, run: str, *, after_step: int) -> None:
        names = keys.run_keys(run)
        self._client = client
        self._events = names.events.encode()
        # Whatever woke the run before is read once more: better than to miss what came between.
        self._signals = {names.wake.encode(): "0-0", names.plan.encode(): f"{after_step}-0"}
        self._plan = names.plan.encode()
        self._last_event = "0-0"

    @property
    def position(self) -> str:
        """Id of the last event that was read; "0-0" before the first."""
        return self._last_event

    def start_after(self, event_id: str) -> None:
        """Begin behind this event: the caller knows what came before."""
        self._last_event = event_id

    def pass_step(self, step: int) -> None:
        """Do not tell of the plan of this step: the caller has written it."""
        self._signals[self._plan] = f"{step}-0"

    def fall_back(self, step: int) -> None:
        """The newest plan is that of this step: later ones that were told of are withdrawn."""
        if int(self._signals[self._plan].partition("-")[0]) > step:
            self.pass_step(step)

    async def read_events(self) -> list[EventEntry]:
        """The next events that are there already, at most PAGE_EVENTS.

        Raises:
            StoreUnavailableError: the store cannot be reached.
        """
        return (await self._read({self._events: self._last_event}, wait_s=None)).events

    async def wait(self, *, with_events: bool, wait_s: float = MAX_BLOCK_S) -> News:
        """What is new, or nothing after `wait_s`, which is at most MAX_BLOCK_S.

        Raises:
            StoreUnavailableError: the store cannot be reached.
        """
        streams = dict(self._signals)
        if with_events:
            streams[self._events] = self._last_event
        return await self._read(streams, wait_s=min(wait_s, MAX_BLOCK_S))

    async def _read(self, streams: dict[bytes, str], *, wait_s: float | None) -> News:
        # BLOCK 0 would wait for ever.
        block = () if wait_s is None else ("BLOCK", max(1, round(wait_s * 1000)))
        words = ("XREAD", "COUNT", PAGE_EVENTS, *block, "STREAMS", *streams, *streams.values())
        try:
            reply: Any = await self._client.execute_command(*words)
        except (RedisError, OSError) as error:
            raise translate(error) from error
        found: dict[bytes, Any] = dict(reply or ())
        new_events = found.pop(self._events, [])
        events = [
            EventEntry(event_id.decode(), fields[b"r"], fields.get(b"t", b"").decode())
            for event_id, fields in new_events
        ]
        if events:
            self._last_event = events[-1].event_id
        for stream, entries in found.items():
            self._signals[stream] = entries[-1][0].decode()
        return News(events=events, is_frontier_old=bool(found))
