"""Scripts of one run, and its events, streams and hashes, read in slices of a bounded size."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import redis
import redis.asyncio

from turnstream.errors import RecordError
from turnstream.records.events import MAX_EVENT_BYTES, decode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import (
    Argument,
    Command,
    Script,
    run_command,
    run_command_async,
)
from turnstream.store.client.stored_values import reading
from turnstream.types import Event


class RunScript:
    """A script in a package of the ledger, and its keys by their names in RunKeys."""

    def __init__(self, name: str, package: str, key_names: str) -> None:
        self.name = name
        self._script = Script(name, f"turnstream_server.ledger.{package}")
        self._key_names = key_names.split()

    def __call__(self, run: str, *args: Argument) -> Command:
        """Return the call of this script for a run; nothing is sent."""
        names = keys.run_keys(run)
        return self._script([getattr(names, each) for each in self._key_names], *args)

    def call(self, client: redis.Redis, run: str, *args: Argument) -> Any:
        """Call this script and return its reply."""
        return run_command(client, self(run, *args))

    async def call_async(self, client: redis.asyncio.Redis, run: str, *args: Argument) -> Any:
        """Call this script and return its reply."""
        return await run_command_async(client, self(run, *args))


PAGE_EVENTS: Final = 400
"""Events of one slice, at most."""

PAGE_BYTES: Final = 1 << 18
"""Bytes of the entries of one slice, at most; one entry may be longer."""

PAGE: Final = 1_000
"""Entries of one reply: a few hundred kilobytes, and a millisecond of the server."""

_READ_EVENTS = RunScript("read_events", "core", "events")
_LIMITS = (PAGE_EVENTS, PAGE_BYTES, MAX_EVENT_BYTES)


class EventEntry(NamedTuple):
    """An event as it is stored.

    Attributes:
        record: empty where `problem` says why.
        posted_for: id of the trajectory that a generator posted it for; empty where none did.
        problem: why the entry has no record; empty where it has one.
    """

    event_id: str
    record: bytes
    posted_for: str = ""
    problem: str = ""


async def read_events_async(
    client: redis.asyncio.Redis, run: str, *, after: str
) -> list[EventEntry]:
    """Return the next events after an id, at most one slice; none at the end."""
    return _entries(await _READ_EVENTS.call_async(client, run, after, *_LIMITS))


def read_events(client: redis.Redis, run: str) -> Iterator[EventEntry]:
    """Yield all events of a run in order, read slice by slice."""
    after = "0-0"
    while entries := _entries(_READ_EVENTS.call(client, run, after, *_LIMITS)):
        yield from entries
        after = entries[-1].event_id


def event_entry(event_id: bytes, fields: Mapping[bytes, bytes]) -> EventEntry:
    """Return the entry with these fields."""
    size = sum(len(name) + len(value) for name, value in fields.items())
    record = None if size > MAX_EVENT_BYTES else fields.get(b"r")
    return _entry(event_id, record, fields.get(b"t"), size)


def _entries(reply: Any) -> list[EventEntry]:
    return [_entry(*each) for each in reply]


def _entry(
    event_id: bytes, record: bytes | None, posted_for: bytes | None, size: int
) -> EventEntry:
    problem = ""
    if record is None and size > MAX_EVENT_BYTES:
        problem = f"an event of {size} bytes, more than {MAX_EVENT_BYTES}"
    elif record is None:
        problem = "the entry of an event has no field r"
    # Bytes that are no UTF-8 become a text that names no trajectory.
    text = (posted_for or b"").decode(errors="backslashreplace")
    return EventEntry(event_id.decode(), record or b"", text, problem)


def stream_entries(
    client: redis.Redis, stream: str, *, after: str = "", page: int = PAGE
) -> Iterator[tuple[str, bytes]]:
    """Yield the id and the record of every entry of a stream after an id, in order.

    The record of an entry without one is empty, which every reader refuses. A reply has `page`
    entries at most: 1 where an entry may have a megabyte.
    """
    start = f"({after}" if after else "-"
    while True:
        with reading(stream), translating():
            entries: Any = client.xrange(stream, min=start, count=page)
        for entry_id, fields in entries:
            yield entry_id.decode(), fields.get(b"r", b"")
        if len(entries) < page:
            return
        start = f"({entries[-1][0].decode()}"


def readable_events(
    client: redis.Redis, run: str, *, is_wanted: Callable[[str], bool] = lambda _: True
) -> Iterator[tuple[str, Event]]:
    """Yield the id and each readable event of a run; the planner rejects the others.

    Seals and rewards are decoded only if `is_wanted` is true of the trajectory id that they were
    posted for.
    """
    for entry in read_events(client, run):
        if entry.posted_for and not is_wanted(entry.posted_for):
            continue
        try:
            event = decode_event(entry.record)
        except RecordError:
            continue
        yield entry.event_id, event


def hash_fields(client: redis.Redis, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield each field and its value once, if the field exists from the first page to the last."""
    cursor = 0
    seen: set[bytes] = set()  # HSCAN returns some fields of a growing hash twice
    while True:
        with reading(name), translating():
            page: Any = client.hscan(name, cursor, count=PAGE)
        cursor, fields = page
        for field, value in fields.items():
            if field not in seen:
                seen.add(field)
                with reading(name):
                    text = field.decode()
                yield text, value
        if cursor == 0:
            return


async def hash_pages(client: redis.asyncio.Redis, name: str) -> AsyncIterator[dict[bytes, bytes]]:
    """Yield the fields of a hash in pages; a field of a growing hash may be in two of them."""
    cursor = 0
    while True:
        with translating():
            page: Any = await client.hscan(name, cursor, count=PAGE)
        cursor, fields = page
        yield fields
        if cursor == 0:
            return


def entry_ms(entry_id: str) -> int:
    """Return the time of an entry in milliseconds of the server's clock.

    >>> entry_ms("1700000000123-4")
    1700000000123
    """
    return int(entry_id.partition("-")[0])


def server_ms(client: redis.Redis) -> int:
    """Return the server's clock in milliseconds."""
    with translating():
        time: Any = client.time()
    seconds, microseconds = time
    return int(seconds) * 1_000 + int(microseconds) // 1_000
