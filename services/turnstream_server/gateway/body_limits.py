"""Limits of bodies that are checked before anything is built from them."""

from __future__ import annotations

from typing import Final

from turnstream.errors import RecordError

MAX_JSON_BYTES: Final = 12 << 20
"""Largest body of JSON. Parsed, it takes up to fifteen times its size in memory."""

MAX_BRACKETS: Final = 1 << 19
"""Objects and lists of one JSON body: each takes up to 200 bytes and 4 µs. Texts count too."""

MAX_QUOTES: Final = 1 << 20
"""Quotation marks of one JSON body, two per text."""


def check_json(body: bytes) -> None:
    """Raise RecordError for JSON that would become too many Python objects."""
    if len(body) > MAX_JSON_BYTES:
        raise RecordError(f"the body has {len(body)} bytes of JSON, more than {MAX_JSON_BYTES}")
    found = {"brackets": body.count(b"{") + body.count(b"["), "quotation marks": body.count(b'"')}
    for (name, count), most in zip(found.items(), (MAX_BRACKETS, MAX_QUOTES), strict=True):
        if count > most:
            raise RecordError(f"the body has {count} {name}, more than {most}: send less at once")
