"""Commands and replies of the store in the bytes of the Redis protocol (RESP2).

The parsers of Redis clients trust their server: one reserves memory for the announced length of an
array. A body comes from anybody, so every length is compared with the bytes that are there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from redis.exceptions import ResponseError

from turnstream.errors import RecordError
from turnstream.store.client.replies import error_text
from turnstream.types.names import shown

MAX_WORDS: Final = 500_000
"""Words of all commands of one body: a publisher sends some thousands."""

_LONGEST_LENGTH: Final = 12
"""Bytes of the line with a length: a kind, at most eleven digits."""

_END: Final = b"\r\n"


def read_commands(body: bytes) -> list[list[bytes]]:
    """Return the words of every command of a body, at least one.

    Raises:
        RecordError: the body is no list of commands, is cut off, or has more than MAX_WORDS words.
    """
    commands: list[list[bytes]] = []
    position = num_words = 0
    while position < len(body):
        count, position = _length(body, position, kind=b"*")
        num_words += count
        if not count >= 1 or num_words > MAX_WORDS:
            raise RecordError(f"a command has {count} words, a body 1 to {MAX_WORDS}")
        words: list[bytes] = []
        for _ in range(count):
            size, start = _length(body, position, kind=b"$")
            stop = start + size
            if body[stop : stop + 2] != _END:
                raise RecordError(f"the {size} bytes at byte {start} are not followed by CRLF")
            words.append(body[start:stop])
            position = stop + 2
        commands.append(words)
    if not commands:
        raise RecordError("the body is empty, expected commands of the Redis protocol")
    return commands


def _length(body: bytes, position: int, *, kind: bytes) -> tuple[int, int]:
    """Return a length, and the position after its line."""
    end = body.find(_END, position, position + _LONGEST_LENGTH + 2)
    line = body[position:end] if end >= 0 else body[position : position + _LONGEST_LENGTH]
    digits = line[1:]
    if end < 0 or line[:1] != kind or not digits.isdigit():
        name = kind.decode()
        raise RecordError(f"byte {position} begins {shown(line)}, expected {name!r} and a number")
    return int(digits), end + 2


def pack_replies(replies: Iterable[Any]) -> bytes:
    """Return replies of redis-py as bytes of the protocol; errors are error replies."""
    parts: list[bytes] = []
    for reply in replies:
        _pack(reply, parts)
    return b"".join(parts)


def _pack(reply: Any, parts: list[bytes]) -> None:
    match reply:
        case None:
            parts.append(b"$-1\r\n")
        case bytes():
            parts += (b"$%d\r\n" % len(reply), reply, _END)
        case int():
            parts.append(b":%d\r\n" % reply)
        case list():
            parts.append(b"*%d\r\n" % len(reply))
            for each in reply:
                _pack(each, parts)
        case ResponseError():
            parts += (b"-", _line(error_text(reply)), _END)
        case _:
            raise TypeError(f"{type(reply).__name__} is no reply of the store")


def _line(text: str) -> bytes:
    """Return a text that an error reply can hold: one line."""
    return " ".join(text.split("\r\n")).replace("\n", " ").replace("\r", " ").encode()
