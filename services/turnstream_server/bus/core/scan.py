"""Streams and hashes of a run read page by page, so that no reply grows with the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import redis

from turnstream.errors import RecordError
from turnstream.records.events import decode_event
from turnstream.store.client.replies import translating
from turnstream.store.client.stored_values import reading
from turnstream.types import Event
from turnstream_server.bus.core.events import read_events

PAGE: Final = 1_000
"""Entries of one reply: a few hundred kilobytes, and a millisecond of the server."""


def stream_entries(
    client: redis.Redis, stream: str, *, after: str = ""
) -> Iterator[tuple[str, bytes]]:
    """Yield the id and the record of every entry of a stream after an id, in order.

    The record of an entry without one is empty, which every reader refuses.
    """
    start = f"({after}" if after else "-"
    while True:
        with reading(stream), translating():
            entries: Any = client.xrange(stream, min=start, count=PAGE)
        for entry_id, fields in entries:
            yield entry_id.decode(), fields.get(b"r", b"")
        if len(entries) < PAGE:
            return
        start = f"({entries[-1][0].decode()}"


def readable_events(client: redis.Redis, run: str) -> Iterator[tuple[str, Event]]:
    """Yield the id and each readable event of a run; the planner rejects the others."""
    for entry in read_events(client, run):
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
