"""Server-sent events: bytes of a stream into events, and JSON into bytes.

The format is that of the HTML standard, without ids and retry times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from pydantic_core import from_json, to_json

from turnstream.errors import RecordError

MAX_EVENT_BYTES: Final = 1 << 20

DONE: Final = b"data: [DONE]\n\n"
"""The last event of a stream of the OpenAI API."""

_END: Final = b"[DONE]"
_SHOWN_BYTES: Final = 80


class EventStreamError(RecordError):
    """An event is too large, or its data is no JSON object."""


class Event(NamedTuple):
    """One event: its data, with a line break between its data lines, and its name."""

    data: bytes
    name: str = ""

    @property
    def is_done(self) -> bool:
        """Return whether it ends a stream of the OpenAI API."""
        return self.data.strip() == _END

    def json(self) -> dict[str, Any]:
        """Return its data; EventStreamError if it is no JSON object."""
        try:
            value = from_json(self.data, cache_strings="keys")
        except ValueError as error:
            raise EventStreamError(f"an event is no JSON: {self._shown()}") from error
        if not isinstance(value, dict):
            raise EventStreamError(f"an event is no JSON object: {self._shown()}")
        return value

    def _shown(self) -> str:
        return repr(self.data[:_SHOWN_BYTES])


class EventReader:
    r"""Reads the events of one stream, whose bytes arrive in any cuts.

    >>> reader = EventReader()
    >>> reader.feed(b': ping\n\ndata: {"a"'), reader.feed(b":1}\r\n\r\n")
    ([], [Event(data=b'{"a":1}', name='')])

    The work is linear in the number of bytes. An event without its blank line is not returned.

    Args:
        max_event_bytes: most bytes of the data of an event, and of a line.
    """

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_event_bytes
        self._line: list[bytes] = []
        """Parts of the line that has no end yet."""
        self._line_bytes = 0
        self._is_after_cr = False
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._name = ""

    def feed(self, received: bytes) -> list[Event]:
        """Return the events that these bytes complete; EventStreamError for one too large."""
        if not received:
            return []
        if self._is_after_cr and received.startswith(b"\n"):
            received = received[1:]  # the second half of a line break
        self._is_after_cr = received.endswith(b"\r")
        lines = received.splitlines()
        rest = b"" if received.endswith((b"\r", b"\n")) or not lines else lines.pop()
        taken = (self._take(self._joined(line)) for line in lines)
        events = [event for event in taken if event is not None]
        if rest:
            self._line.append(rest)
            self._line_bytes += len(rest)
            self._check(self._line_bytes)
        return events

    def _joined(self, end: bytes) -> bytes:
        if not self._line:
            return end
        line = b"".join([*self._line, end])
        self._line.clear()
        self._line_bytes = 0
        return line

    def _take(self, line: bytes) -> Event | None:
        """Take a line; return the event that a blank one ends."""
        if not line:
            return self._ended()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data_bytes += len(value) + 1
            self._check(self._data_bytes - 1)
            self._data.append(value)
        elif field == b"event":
            self._name = value.decode(errors="replace")
        return None

    def _ended(self) -> Event | None:
        event = Event(b"\n".join(self._data), self._name) if self._data else None
        self._data.clear()
        self._data_bytes = 0
        self._name = ""
        return event

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            message = f"an event has more than {self._max_bytes} bytes"
            raise EventStreamError(f"{message}, the most that is read")


def event_bytes(content: Mapping[str, Any], *, name: str = "") -> bytes:
    r"""Return an event with this JSON as data.

    >>> event_bytes({"a": "b\n"}, name="delta")
    b'event: delta\ndata: {"a":"b\\n"}\n\n'
    """
    head = f"event: {name}\n".encode() if name else b""
    return b"".join((head, b"data: ", to_json(content), b"\n\n"))
