"""The commands and options that simulated runs use.

Anything else raises NotSimulatedError. `tests/simulation/test_store.py` compares the replies with a
server's. A blocking read is a matter of `world`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from simulator.store.values import (
    LAST_ID,
    EntryId,
    NotSimulatedError,
    Status,
    StoreError,
    Stream,
    Words,
    ZSet,
    integer,
    score_of,
    shown,
)

if TYPE_CHECKING:
    from simulator.store.store import Store

Command = Callable[["Store", Words], Any]


def _unknown(words: Words) -> NotSimulatedError:
    return NotSimulatedError(b" ".join(words).decode(errors="replace"))


def _options(words: Words, start: int, **sizes: int) -> dict[str, Words]:
    found: dict[str, Words] = {}
    while start < len(words):
        name = words[start].upper().decode(errors="replace")
        if name not in sizes:
            raise _unknown(words)
        found[name] = words[start + 1 : start + 1 + sizes[name]]
        start += 1 + sizes[name]
    return found


def _read(kind: type[Any], read: Callable[[Any, Words], Any]) -> Command:
    """Return a command that reads the value of a key; a missing key has an empty one."""

    def carry_out(store: Store, words: Words) -> Any:
        value = store.get(words[1], kind)
        return read(kind() if value is None else value, words)

    return carry_out


def _change(kind: type[Any], change: Callable[[Any, Words], Any]) -> Command:
    """Return a command that changes a value; a collection without members is no key."""

    def carry_out(store: Store, words: Words) -> Any:
        value = store.make(words[1], kind)
        try:
            return change(value, words)
        finally:
            if not value:
                store.drop(words[1])

    return carry_out


def _adds(kind: type[Any], add: Callable[[Any, Words], object]) -> Command:
    """Return a command that adds members; it replies how many of them are new."""

    def change(value: Any, words: Words) -> int:
        num_before = len(value)
        add(value, words)
        return len(value) - num_before

    return _change(kind, change)


def _time(store: Store, words: Words) -> Any:
    microseconds = int(store.now_ms * 1000)
    return [b"%d" % (microseconds // 1_000_000), b"%d" % (microseconds % 1_000_000)]


def _expire_after(store: Store, words: Words) -> int:
    _options(words, 3)
    left_ms = integer(words[2])
    if words[1] not in store.values:
        return 0
    if left_ms <= 0:
        store.drop(words[1])
    else:
        store.expire_at(words[1], store.now_ms + left_ms)
    return 1


def _script(store: Store, words: Words) -> Any:
    if words[1].upper() != b"LOAD":
        raise _unknown(words[:2])
    sha = store.scripts.load(words[2])
    store.known_scripts.add(sha)
    return sha


def _info(store: Store, words: Words) -> bytes:
    """A server without `maxmemory`, which need not count what it uses; and which start of it."""
    match [word.upper() for word in words[1:]]:
        case [b"MEMORY"]:
            return b"# Memory\r\nused_memory:0\r\nmaxmemory:0\r\n"
        case [b"PERSISTENCE"]:
            return b"# Persistence\r\naof_last_write_status:ok\r\n"
        case [b"SERVER"]:
            return b"# Server\r\nrun_id:%b\r\n" % store.run_id
        case _:
            raise _unknown(words)


def _config(store: Store, words: Words) -> Any:
    names = [b"APPENDFSYNC", b"NO-APPENDFSYNC-ON-REWRITE"]
    if [word.upper() for word in words[1:]] != [b"GET", *names]:
        raise _unknown(words)
    return [b"appendfsync", store.appends_only, b"no-appendfsync-on-rewrite", b"no"]


_Fields = dict[bytes, bytes]


def _hincrby(fields: _Fields, words: Words) -> int:
    number = integer(fields.get(words[2], b"0")) + integer(words[3])
    fields[words[2]] = b"%d" % number
    return number


def _place(field: bytes) -> int:
    """Return the place of a field in a scan, which no other field changes."""
    return 1 + sum(byte * 31**index for index, byte in enumerate(field)) % (2**48)


def _hscan(fields: _Fields, words: Words) -> Any:
    (count,) = _options(words, 3, COUNT=1).get("COUNT", (b"10",))
    cursor, most = int(words[2]), max(1, int(count))
    if not cursor and len(fields) <= most:
        return [b"0", _flat(fields.items())]
    left = sorted((place, name) for name in fields if (place := _place(name)) > cursor)
    last = left[min(most, len(left)) - 1][0] if left else 0
    page = [name for place, name in left if place <= last]
    found = _flat([(name, fields[name]) for name in page])
    return [b"%d" % last if len(page) < len(left) else b"0", found]


def _flat(pairs: Any) -> list[bytes]:
    return [word for pair in pairs for word in pair]


def _zadd(zset: ZSet, words: Words) -> int:
    """ZADD key [NX | XX LT] score member ..."""
    is_new_only, is_lower_only = words[2].upper() == b"NX", words[2].upper() == b"XX"
    first = 2 + is_new_only + 2 * is_lower_only
    if is_lower_only and words[3].upper() != b"LT":
        raise _unknown(words)
    pairs = [(score_of(words[i]), words[i + 1]) for i in range(first, len(words), 2)]
    num_new = 0
    for score, member in pairs:
        known = zset.scores.get(member)
        if is_new_only and known is not None:
            continue
        if not is_lower_only or (known is not None and score < known):
            num_new += zset.add(member, score)
    return num_new


def _zscore(zset: ZSet, words: Words) -> Any:
    score = zset.scores.get(words[2])
    return None if score is None else shown(score)


def _listed(pairs: Sequence[tuple[float, bytes]], *, with_scores: bool) -> list[bytes]:
    if not with_scores:
        return [member for _, member in pairs]
    return [word for score, member in pairs for word in (member, shown(score))]


def _zrange(zset: ZSet, words: Words) -> list[bytes]:
    options = _options(words, 4, WITHSCORES=0)
    first, last = integer(words[2]), integer(words[3])
    first = max(0, first + len(zset)) if first < 0 else first
    last = last + len(zset) if last < 0 else last
    return _listed(zset.order[first : last + 1], with_scores=bool(options))


def _zrangebyscore(zset: ZSet, words: Words) -> list[bytes]:
    options = _options(words, 4, WITHSCORES=0, LIMIT=2)
    least, most = (score_of(word.removeprefix(b"(")) for word in words[2:4])
    is_above, is_below = (word.startswith(b"(") for word in words[2:4])
    pairs = [
        pair
        for pair in zset.order
        if (least < pair[0] if is_above else least <= pair[0])
        and (pair[0] < most if is_below else pair[0] <= most)
    ]
    start, count = map(integer, options.get("LIMIT", (b"0", b"-1")))
    pairs = pairs[start:]
    return _listed(pairs if count < 0 else pairs[:count], with_scores="WITHSCORES" in options)


def _entry_id(word: bytes, *, seq: int) -> EntryId:
    if word == b"-":
        return EntryId(0, 0)
    if word == b"+":
        return LAST_ID
    ms, dash, number = word.partition(b"-")
    return EntryId(integer(ms), integer(number) if dash else seq)


def _xsetid(store: Store, words: Words) -> Status:
    stream = store.get(words[1], Stream)
    if stream is None:
        raise StoreError("ERR no such key")
    last_id = _entry_id(words[2], seq=0)
    if stream.ids and last_id < stream.ids[-1]:
        raise StoreError(
            "ERR The ID specified in XSETID is smaller than the target stream top item"
        )
    stream.last_id = last_id
    return Status(b"OK")


def _next_id(stream: Stream, word: bytes, *, now_ms: float) -> EntryId:
    last = stream.last_id
    if word == b"*":
        now = EntryId(int(now_ms), 0)
        return now if now > last else EntryId(last.ms, last.seq + 1)
    made = _entry_id(word, seq=0)
    if made <= last:
        raise StoreError(
            "ERR The ID specified in XADD is equal or smaller than the target stream top item"
        )
    return made


def _xadd(store: Store, words: Words) -> bytes | None:
    at, most, is_about = 2, None, words[3] == b"~"
    if words[2].upper() == b"MAXLEN":
        at = 5 if is_about else 4
        most = int(words[at - 1])
    needs_stream = words[2].upper() == b"NOMKSTREAM"
    at += needs_stream
    stream = store.get(words[1], Stream)
    if stream is None and needs_stream:
        return None
    stream = Stream() if stream is None else stream
    entry_id = _next_id(stream, words[at], now_ms=store.now_ms)
    fields = [*words[at + 1 :]]
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


def _positions(stream: Stream, words: Words, *, low: bytes, high: bytes) -> range:
    first, last = _entry_id(low.lstrip(b"("), seq=0), _entry_id(high.lstrip(b"("), seq=LAST_ID.seq)
    found = stream.between(_after(first) if low[:1] == b"(" else first, last)
    is_below = high[:1] == b"(" and len(found) and stream.ids[found[-1]] == last
    return found[:-1] if is_below else found


def _count(words: Words) -> int | None:
    options = _options(words, 4, COUNT=1)
    return integer(options["COUNT"][0]) if options else None


def _xrange(stream: Stream, words: Words) -> list[Any]:
    found = _positions(stream, words, low=words[2], high=words[3])
    return _entries(stream, found[: _count(words)])


def _xrevrange(stream: Stream, words: Words) -> list[Any]:
    found = _positions(stream, words, low=words[3], high=words[2])
    return _entries(stream, found[::-1][: _count(words)])


def _xtrim(store: Store, words: Words) -> int:
    """XTRIM key MINID id, or MINID ~ id LIMIT number: no entry is kept for the tilde."""
    match [word.upper() for word in words[2:]]:
        case [b"MINID", first_kept]:
            limit = None
        case [b"MINID", b"~", first_kept, b"LIMIT", most]:
            limit = integer(most)
        case _:
            raise _unknown(words)
    stream = store.get(words[1], Stream)
    if stream is None:
        return 0
    num_old = stream.between(_entry_id(first_kept, seq=0), LAST_ID).start
    return stream.trim(num_old if limit is None else min(num_old, limit))


def _xread(store: Store, words: Words) -> Any:
    at, count = 1, None
    if words[at].upper() == b"COUNT":
        count, at = integer(words[at + 1]), at + 2
    if words[at].upper() != b"STREAMS":
        raise _unknown(words)
    names = words[at + 1 : at + 1 + (len(words) - at - 1) // 2]
    found: list[Any] = []
    for name, position in zip(names, words[at + 1 + len(names) :], strict=True):
        stream = store.get(name, Stream)
        after = _after(_entry_id(position, seq=0))
        entries = [] if stream is None else _entries(stream, stream.between(after, LAST_ID)[:count])
        if entries:
            found.append([name, entries])
    return found or None


COMMANDS: dict[bytes, Command] = {
    b"TIME": _time,
    b"EXISTS": lambda store, words: sum(key in store.values for key in words[1:]),
    b"UNLINK": lambda store, words: sum([store.drop(key) for key in words[1:]]),
    b"DEL": lambda store, words: sum([store.drop(key) for key in words[1:]]),
    b"PEXPIRE": _expire_after,
    b"SCRIPT": _script,
    b"CONFIG": _config,
    b"INFO": _info,
    b"PING": lambda store, words: Status(b"PONG"),
    b"GET": lambda store, words: store.get(words[1], bytes),
    b"HGET": _read(dict, lambda fields, words: fields.get(words[2])),
    b"HMGET": _read(dict, lambda fields, words: [fields.get(name) for name in words[2:]]),
    b"HGETALL": _read(dict, lambda fields, words: _flat(fields.items())),
    b"HKEYS": _read(dict, lambda fields, words: [*fields]),
    b"HVALS": _read(dict, lambda fields, words: [*fields.values()]),
    b"HLEN": _read(dict, lambda fields, words: len(fields)),
    b"HEXISTS": _read(dict, lambda fields, words: int(words[2] in fields)),
    b"HSCAN": _read(dict, _hscan),
    b"HSET": _adds(dict, lambda fields, w: fields.update(zip(w[2::2], w[3::2], strict=True))),
    b"HSETNX": _adds(dict, lambda fields, words: fields.setdefault(words[2], words[3])),
    b"HINCRBY": _change(dict, _hincrby),
    b"HDEL": _change(
        dict, lambda fields, words: sum([fields.pop(n, None) is not None for n in words[2:]])
    ),
    b"SADD": _adds(set, lambda members, words: members.update(words[2:])),
    b"ZSCORE": _read(ZSet, _zscore),
    b"ZCARD": _read(ZSet, lambda zset, words: len(zset)),
    b"ZRANGE": _read(ZSet, _zrange),
    b"ZRANGEBYSCORE": _read(ZSet, _zrangebyscore),
    b"ZADD": _change(ZSet, _zadd),
    b"ZREM": _change(ZSet, lambda zset, words: sum([zset.remove(each) for each in words[2:]])),
    b"XADD": _xadd,
    b"XLEN": _read(Stream, lambda stream, words: len(stream)),
    b"XSETID": _xsetid,
    b"XRANGE": _read(Stream, _xrange),
    b"XREVRANGE": _read(Stream, _xrevrange),
    b"XTRIM": _xtrim,
    b"XREAD": _xread,
}
WRITES = frozenset(
    {
        *(b"UNLINK", b"DEL", b"PEXPIRE", b"HSET", b"HSETNX", b"HDEL", b"HINCRBY"),
        *(b"SADD", b"ZADD", b"ZREM", b"XADD", b"XSETID", b"XTRIM"),
    }
)
"""Those that a script with the flag no-writes may not call."""
