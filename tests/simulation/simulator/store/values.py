"""Values of the keys of the store in memory, and the words of commands.

bytes: a string; dict: a hash; set: a set; ZSet; Stream.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from typing import NamedTuple


class StoreError(Exception):
    """An error reply: its text, code first."""


class Status(bytes):
    """A simple string such as OK, which scripts see as a table."""


class EntryId(NamedTuple):
    """The id of an entry of a stream."""

    ms: int
    seq: int

    def __bytes__(self) -> bytes:
        return b"%d-%d" % self


LAST_ID = EntryId(2**64 - 1, 2**64 - 1)


class ZSet:
    """Members by score; equal scores are sorted by name."""

    __slots__ = ("order", "scores")

    def __init__(self) -> None:
        self.scores: dict[bytes, float] = {}
        self.order: list[tuple[float, bytes]] = []

    def __len__(self) -> int:
        return len(self.scores)

    def add(self, member: bytes, score: float) -> bool:
        """Whether the member is new."""
        before = self.scores.get(member)
        if before is not None:
            self.order.remove((before, member))
        self.scores[member] = score
        insort(self.order, (score, member))
        return before is None

    def remove(self, member: bytes) -> bool:
        """Whether it was there."""
        before = self.scores.pop(member, None)
        if before is None:
            return False
        self.order.remove((before, member))
        return True


class Stream:
    """Entries by ascending id."""

    __slots__ = ("entries", "ids", "last_id")

    def __init__(self) -> None:
        self.ids: list[EntryId] = []
        self.entries: list[list[bytes]] = []
        self.last_id = EntryId(0, 0)

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, entry_id: EntryId, fields: list[bytes]) -> None:
        """Append an entry; its id is above the last."""
        self.ids.append(entry_id)
        self.entries.append(fields)
        self.last_id = entry_id

    def between(self, first: EntryId, last: EntryId) -> range:
        """The positions of the entries from one id to another, both included."""
        return range(bisect_left(self.ids, first), bisect_right(self.ids, last))

    def trim(self, num_entries: int) -> int:
        """Remove so many of the oldest."""
        del self.ids[:num_entries]
        del self.entries[:num_entries]
        return num_entries


Value = bytes | dict[bytes, bytes] | set[bytes] | ZSet | Stream

Words = Sequence[bytes]

_NO_INTEGER = "ERR value is not an integer or out of range"
_NO_FLOAT = "ERR value is not a valid float"


class NotSimulatedError(NotImplementedError):
    """The store in memory does not have this; add it, and compare it with a real server."""


def integer(word: bytes) -> int:
    digits = word[1:] if word[:1] == b"-" else word
    if not digits.isdigit():
        raise StoreError(_NO_INTEGER)
    return int(word)


def score_of(word: bytes) -> float:
    try:
        number = float(word)
    except ValueError:
        raise StoreError(_NO_FLOAT) from None
    if number != number or word != word.strip() or b"_" in word:
        raise StoreError(_NO_FLOAT)
    return number


def shown(score: float) -> bytes:
    if score == int(score) and abs(score) < 1e17:
        return b"%d" % score
    return b"%.17g" % score
