"""Anchors: 64 bits that stand for the state in which a turn began.

Turns of a group that began in the same state can be compared with each other (estimator "gigpo").
A text or bytes become the first 8 bytes of their SHA-256, read big-endian; a text is the bytes of
its UTF-8 form. Any language and any process gives the same number, and a generator may send such a
number itself.
"""

from __future__ import annotations

import hashlib
import operator
from typing import Any

from turnstream.errors import InvalidTurnError
from turnstream.types.names import shown

_NUM_BYTES = 8
_LIMIT = 2 ** (8 * _NUM_BYTES)


def anchor_hash(anchor: Any) -> int | None:
    """Return the stored number of an anchor: its hash, or the number itself, or None for None.

    >>> anchor_hash("room 3") == anchor_hash(b"room 3") == 0xCE7E7C3D821BD771
    True
    >>> anchor_hash(7), anchor_hash(None)
    (7, None)
    """
    if anchor is None:
        return None
    if isinstance(anchor, str):
        try:
            anchor = anchor.encode()
        except UnicodeEncodeError as error:  # half a surrogate pair has no UTF-8 form
            raise InvalidTurnError("anchor", f"{shown(anchor)} is no valid Unicode") from error
    if isinstance(anchor, bytes):
        return int.from_bytes(hashlib.sha256(anchor).digest()[:_NUM_BYTES], "big")
    return _checked_number(anchor)


def _checked_number(anchor: Any) -> int:
    try:
        number = operator.index(anchor)
    except TypeError as error:
        raise InvalidTurnError(
            "anchor", f"{shown(anchor)} is not a text, bytes or a whole number"
        ) from error
    if isinstance(anchor, bool) or not 0 <= number < _LIMIT:
        raise InvalidTurnError(
            "anchor", f"{shown(anchor)} is not a whole number from 0 to 2^64 - 1"
        )
    return number
