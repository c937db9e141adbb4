"""Commands on streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from simulator.values import (
    LAST_ID,
    Command,
    EntryId,
    NotSimulatedError,
    StoreError,
    Stream,
    Words,
    integer,
)

if TYPE_CHECKING:
    from simulator.store import Store


def _entry_id(word: bytes, *, seq: int) -> EntryId:
    if word == b"-":
        return EntryId(0, 0)
    if word == b"+":
        return LAST_ID
    ms, dash, number = word.partition(b"-")
    if not (ms.isdigit() and (number.isdigit() or not dash)):
        raise StoreError("ERR Invalid stream ID specified as stream command argument")
    return EntryId(int(ms), int(number) if dash else seq)


def _next_id(stream: Stream, word: bytes, *, now_ms: float) -> EntryId:
    last = stream.last_id
    if word == b"*":
        now = EntryId(int(now_ms), 0)
        return now if now > last else EntryId(last.ms, last.seq + 1)
    made = _entry_id(word, seq=0)
    if made == (0, 0):
        raise StoreError("ERR The ID specified in XADD must be greater than 0-0")
    if made <= last:
        raise StoreError(
            "ERR The ID specified in XADD is equal or smaller than the target stream top item"
        )
    return made


def _xadd(store: Store, words: Words) -> bytes:
    at, most, is_about = 2, None, False
    if words[2].upper() == b"MAXLEN":
        is_about = words[3] == b"~"
        at = 5 if is_about else 4
        most = int(words[at - 1])
    if words[at].upper() in {b"MINID", b"NOMKSTREAM", b"=", b"~", b"LIMIT"}:
        raise NotSimulatedError(b" ".join(words).decode(errors="replace"))
    existing = store.get(words[1], Stream)
    stream = Stream() if existing is None else existing
    entry_id = _next_id(stream, words[at], now_ms=store.now_ms)
    fields = [*words[at + 1 :]]
    if not fields or len(fields) % 2:
        raise StoreError("ERR wrong number of arguments for 'xadd' command")
    store.values[words[1]] = stream
    store.num_added += 1
    stream.add(entry_id, fields)
    if most is not None and len(stream) > most:
        if is_about:
            raise NotSimulatedError("which entries a server trims that need not be exact")
        stream.trim(len(stream) - most)
    if store.appended is not None:
        store.appended(words[1], entry_id, fields)
    return bytes(entry_id)


def _entries(stream: Stream, positions: Sequence[int]) -> list[Any]:
    return [[bytes(stream.ids[i]), [*stream.entries[i]]] for i in positions]


def _after(entry_id: EntryId) -> EntryId:
    return EntryId(entry_id.ms, entry_id.seq + 1)


def _before(entry_id: EntryId) -> EntryId:
    if entry_id == (0, 0):
        raise StoreError("ERR invalid end ID for the interval")
    if entry_id.seq == 0:
        return EntryId(entry_id.ms - 1, LAST_ID.seq)
    return EntryId(entry_id.ms, entry_id.seq - 1)


def _range_bounds(low: bytes, high: bytes) -> tuple[EntryId, EntryId]:
    first = _after(_entry_id(low[1:], seq=0)) if low[:1] == b"(" else _entry_id(low, seq=0)
    if high[:1] == b"(":
        return first, _before(_entry_id(high[1:], seq=LAST_ID.seq))
    return first, _entry_id(high, seq=LAST_ID.seq)


def _count(words: Words, at: int) -> int | None:
    if len(words) == at:
        return None
    if words[at].upper() != b"COUNT" or len(words) != at + 2:
        raise NotSimulatedError(b" ".join(words).decode())
    return integer(words[at + 1])


def _xrange(store: Store, words: Words) -> list[Any]:
    first, last = _range_bounds(words[2], words[3])
    count = _count(words, 4)
    stream = store.get(words[1], Stream)
    return [] if stream is None else _entries(stream, stream.between(first, last)[:count])


def _xrevrange(store: Store, words: Words) -> list[Any]:
    first, last = _range_bounds(words[3], words[2])
    count = _count(words, 4)
    stream = store.get(words[1], Stream)
    return [] if stream is None else _entries(stream, stream.between(first, last)[::-1][:count])


def _xlen(store: Store, words: Words) -> int:
    return len(store.get(words[1], Stream) or ())


def _xdel(store: Store, words: Words) -> int:
    stream = store.get(words[1], Stream)
    if stream is None:
        return 0
    ids = [_entry_id(word, seq=0) for word in words[2:]]
    return sum([stream.remove(entry_id) for entry_id in ids])


def _xtrim(store: Store, words: Words) -> int:
    stream = store.get(words[1], Stream)
    if words[2].upper() == b"MAXLEN" and len(words) == 4:
        return 0 if stream is None else stream.trim(max(0, len(stream) - integer(words[3])))
    if words[2].upper() != b"MINID":
        raise NotSimulatedError(b" ".join(words).decode())
    # "~" lets a server keep what it likes: here it keeps nothing that it may remove.
    is_about = words[3] == b"~"
    least = _entry_id(words[4] if is_about else words[3], seq=0)
    limit = None
    if is_about and len(words) == 7 and words[5].upper() == b"LIMIT":
        limit = integer(words[6])
    elif len(words) != (5 if is_about else 4):
        raise NotSimulatedError(b" ".join(words).decode())
    if stream is None:
        return 0
    num_old = bisect_ids(stream, least)
    return stream.trim(num_old if limit is None else min(num_old, limit))


def bisect_ids(stream: Stream, least: EntryId) -> int:
    """How many entries are below an id."""
    return stream.between(least, LAST_ID).start


def _xread(store: Store, words: Words) -> Any:
    """Without BLOCK, which is a matter of the client: see `clients`."""
    at, count = 1, None
    if words[at].upper() == b"COUNT":
        count, at = integer(words[at + 1]), at + 2
    if words[at].upper() != b"STREAMS":
        raise NotSimulatedError(b" ".join(words).decode())
    names = words[at + 1 : at + 1 + (len(words) - at - 1) // 2]
    found: list[Any] = []
    for name, position in zip(names, words[at + 1 + len(names) :], strict=True):
        stream = store.get(name, Stream)
        after = _after(_entry_id(position, seq=0))
        entries = [] if stream is None else _entries(stream, stream.between(after, LAST_ID)[:count])
        if entries:
            found.append([name, entries])
    return found or None


STREAMS: dict[bytes, Command] = {
    b"XADD": _xadd,
    b"XRANGE": _xrange,
    b"XREVRANGE": _xrevrange,
    b"XLEN": _xlen,
    b"XDEL": _xdel,
    b"XTRIM": _xtrim,
    b"XREAD": _xread,
}
