"""Waits for new entries of streams: one connection for all waiters of a process.

A blocking read holds its connection. So all streams are read by one command, which is sent again
when another stream is added. A stream without waiters is read for a while longer, because the next
waiter usually comes soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from turnstream.errors import TurnstreamError, UnavailableError
from turnstream.store.client.cancellation import cancel_all
from turnstream.store.client.connection import MAX_BLOCK_S, AsyncLink
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import pack
from turnstream_server.keys.limits import without_place

logger = logging.getLogger(__name__)

_COUNT: Final = 64
_LINGER_S: Final = 30.0
"""Time for which a stream without waiters is still read."""

_RETRY_S: Final = 0.5
_ANSWER_S: Final = 5.0
"""Time for the answer to a read, after its block."""


class EntryId(NamedTuple):
    """The id of an entry of a stream, in its order."""

    ms: int
    number: int

    @classmethod
    def parse(cls, text: str) -> EntryId:
        """Return the id of a text such as "1700000000123-4"."""
        ms, _, number = text.partition("-")
        return cls(int(ms), int(number or 0))

    def __str__(self) -> str:
        return f"{self.ms}-{self.number}"


class _Stream:
    """A stream that is read: its newest known entry, and the entry that each waiter knows."""

    def __init__(self, position: EntryId) -> None:
        self.position = position
        self.waiters: dict[asyncio.Event, EntryId] = {}
        self.idle_since_s = 0.0

    def advance(self, position: EntryId) -> None:
        """Note a newer entry, and notify the waiters that do not know it."""
        self.position = max(self.position, position)
        for event, known in self.waiters.items():
            if known < self.position:
                event.set()


class StreamWaits:
    """The waits of one process. Once it stops (`is_closed`), no wait is held any more."""

    def __init__(self, url: str) -> None:
        self.is_closed = False
        self._url = url
        self._streams: dict[str, _Stream] = {}
        self._has_new_stream = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    @property
    def num_waiters(self) -> int:
        """Return the number of waits for a stream."""
        return sum(len(stream.waiters) for stream in self._streams.values())

    @property
    def is_reading(self) -> bool:
        """Whether the store is read."""
        return self._reading is not None

    async def wait(self, known: Mapping[str, str], *, timeout_s: float) -> None:
        """Return when one of these streams has an entry after the known one, or after `timeout_s`.

        Returns early if the store was away: entries may have been missed. The caller reads the
        streams and waits again. UnavailableError once the process stops.
        """
        self._check_open()
        notified = asyncio.Event()
        with contextlib.ExitStack() as stack:
            for name, entry_id in known.items():
                stack.enter_context(self._waiting(name, EntryId.parse(entry_id), notified))
            if self._reading is None:
                self._reading = asyncio.create_task(self._read(), name="stream-waits")
            async with without_place():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        await notified.wait()
        self._check_open()

    def close(self) -> None:
        """End all waits at once."""
        self.is_closed = True
        self._notify_all()

    async def stop(self) -> None:
        """End all waits, and disconnect."""
        self.close()
        if self._reading is not None:
            await cancel_all([self._reading])

    def _check_open(self) -> None:
        if self.is_closed:
            raise UnavailableError("the gateway stops", retry_after_s=1.0)

    @contextlib.contextmanager
    def _waiting(self, name: str, known: EntryId, notified: asyncio.Event) -> Iterator[None]:
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = _Stream(known)
            self._has_new_stream.set()
        stream.waiters[notified] = known
        if known < stream.position:
            notified.set()
        try:
            yield
        finally:
            del stream.waiters[notified]
            stream.idle_since_s = _now_s()

    def _notify_all(self) -> None:
        for stream in self._streams.values():
            for event in stream.waiters:
                event.set()

    async def _read(self) -> None:
        """Read all streams until none has had a waiter for a while."""
        link = AsyncLink(self._url)
        try:
            while self._drop_idle():
                try:
                    await self._read_once(link)
                except TurnstreamError as error:
                    logger.warning("waits for streams: %s", error)
                    await asyncio.sleep(_RETRY_S)
                    self._notify_all()
                    self._streams = {}  # a restarted store may have lost the newest entries
        finally:
            self._reading = None  # the next waiter starts another task
            await link.close()

    def _drop_idle(self) -> bool:
        now_s = _now_s()
        for name, stream in [*self._streams.items()]:
            if not stream.waiters and now_s - stream.idle_since_s > _LINGER_S:
                del self._streams[name]
        return bool(self._streams)

    async def _read_once(self, link: AsyncLink) -> None:
        """Read the next entries of all streams, until one comes or another stream is added."""
        self._has_new_stream.clear()
        names = [*self._streams]
        positions = [str(self._streams[name].position) for name in names]
        block_ms = round(MAX_BLOCK_S * 1000)
        words = ("XREAD", "BLOCK", block_ms, "COUNT", _COUNT, "STREAMS", *names, *positions)
        within_s = MAX_BLOCK_S + _ANSWER_S
        reading = asyncio.create_task(link.exchange(pack([words]), 1, timeout_s=within_s))
        added = asyncio.create_task(self._has_new_stream.wait())
        try:
            await asyncio.wait([reading, added], return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                with translating():
                    self._advance(reading.result()[0])
        finally:
            await cancel_all([reading, added])

    def _advance(self, reply: Any) -> None:
        if isinstance(reply, Exception):
            raise reply
        newest: dict[str, EntryId] = defaultdict(lambda: EntryId(0, 0))
        for name, entries in reply or ():
            newest[name.decode()] = EntryId.parse(entries[-1][0].decode())
        for name, entry_id in newest.items():
            if name in self._streams:
                self._streams[name].advance(entry_id)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
