"""Commands on keys, strings, hashes and sets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simulator.values import (
    OK,
    Command,
    NotSimulatedError,
    Status,
    StoreError,
    Words,
    integer,
    refuse_options,
)

if TYPE_CHECKING:
    from simulator.store import Store


# keys


def _time(store: Store, words: Words) -> Any:
    microseconds = int(store.now_ms * 1000)
    return [b"%d" % (microseconds // 1_000_000), b"%d" % (microseconds % 1_000_000)]


def _exists(store: Store, words: Words) -> int:
    return sum(key in store.values for key in words[1:])


def _unlink(store: Store, words: Words) -> int:
    return sum([store.drop(key) for key in words[1:]])


def _expire_after(store: Store, words: Words) -> int:
    refuse_options(words, 3)
    left_ms = integer(words[2])
    if words[1] not in store.values:
        return 0
    if left_ms <= 0:
        store.drop(words[1])
    else:
        store.expire_at(words[1], store.now_ms + left_ms)
    return 1


def _left(store: Store, words: Words) -> int:
    if words[1] not in store.values:
        return -2
    end_ms = store.expires.get(words[1])
    if end_ms is None:
        return -1
    return int(end_ms - store.now_ms)


def _script(store: Store, words: Words) -> Any:
    if words[1].upper() != b"LOAD":
        raise NotSimulatedError(f"SCRIPT {words[1].decode()}")
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
            raise NotSimulatedError(b" ".join(words).decode())


def _ping(store: Store, words: Words) -> Status:
    refuse_options(words, 1)
    return Status(b"PONG")


def _config(store: Store, words: Words) -> Any:
    names = [b"APPENDFSYNC", b"NO-APPENDFSYNC-ON-REWRITE"]
    if [word.upper() for word in words[1:]] != [b"GET", *names]:
        raise NotSimulatedError(b" ".join(words).decode())
    return [b"appendfsync", store.appends_only, b"no-appendfsync-on-rewrite", b"no"]


# strings


def _get(store: Store, words: Words) -> Any:
    return store.get(words[1], bytes)


def _set(store: Store, words: Words) -> Any:
    options = [word.upper() for word in words[3:]]
    if any(option != b"NX" for option in options):
        raise NotSimulatedError(b" ".join(words[3:]).decode())
    if options and words[1] in store.values:
        return None
    store.drop(words[1])
    store.values[words[1]] = words[2]
    return OK


# hashes


def _hget(store: Store, words: Words) -> Any:
    fields = store.get(words[1], dict)
    return None if fields is None else fields.get(words[2])


def _hset(store: Store, words: Words) -> int:
    if len(words) < 4 or len(words) % 2:
        raise StoreError(f"ERR wrong number of arguments for '{words[0].decode().lower()}' command")
    fields = store.make(words[1], dict)
    num_before = len(fields)
    fields.update(zip(words[2::2], words[3::2], strict=True))
    return len(fields) - num_before


def _hsetnx(store: Store, words: Words) -> int:
    fields = store.make(words[1], dict)
    if words[2] in fields:
        return 0
    fields[words[2]] = words[3]
    return 1


def _hmget(store: Store, words: Words) -> list[bytes | None]:
    fields = store.get(words[1], dict) or {}
    return [fields.get(name) for name in words[2:]]


def _hgetall(store: Store, words: Words) -> list[bytes]:
    fields = store.get(words[1], dict) or {}
    return [word for pair in fields.items() for word in pair]


def _hkeys(store: Store, words: Words) -> list[bytes]:
    return [*(store.get(words[1], dict) or ())]


def _hvals(store: Store, words: Words) -> list[bytes]:
    return [*(store.get(words[1], dict) or {}).values()]


def _hlen(store: Store, words: Words) -> int:
    return len(store.get(words[1], dict) or ())


def _hexists(store: Store, words: Words) -> int:
    return int(words[2] in (store.get(words[1], dict) or ()))


def _hdel(store: Store, words: Words) -> int:
    fields = store.get(words[1], dict)
    if fields is None:
        return 0
    num_gone = sum([fields.pop(name, None) is not None for name in words[2:]])
    store.drop_if_empty(words[1], fields)
    return num_gone


def _hincrby(store: Store, words: Words) -> int:
    by = integer(words[3])
    fields = store.make(words[1], dict)
    try:
        number = integer(fields.get(words[2], b"0")) + by
    except StoreError:
        raise StoreError("ERR hash value is not an integer") from None
    fields[words[2]] = b"%d" % number
    return number


def _place(field: bytes) -> int:
    """Where a field stands in a scan: the same place, whatever comes and goes beside it."""
    return 1 + sum(byte * 31**index for index, byte in enumerate(field)) % (2**48)


def _hscan(store: Store, words: Words) -> Any:
    options = {words[i].upper(): words[i + 1] for i in range(3, len(words), 2)}
    if options.keys() - {b"COUNT"}:
        raise NotSimulatedError(b" ".join(words).decode())
    count = max(1, int(options.get(b"COUNT", b"10")))
    fields = store.get(words[1], dict) or {}
    cursor = int(words[2])
    if not cursor and len(fields) <= count:
        return [b"0", [word for pair in fields.items() for word in pair]]
    left = sorted((place, name) for name in fields if (place := _place(name)) > cursor)
    last = left[min(count, len(left)) - 1][0] if left else 0
    page = [name for place, name in left if place <= last]
    found = [word for name in page for word in (name, fields[name])]
    return [b"%d" % last if len(page) < len(left) else b"0", found]


# sets


def _sadd(store: Store, words: Words) -> int:
    members = store.make(words[1], set)
    num_before = len(members)
    members.update(words[2:])
    return len(members) - num_before


PLAIN: dict[bytes, Command] = {
    b"TIME": _time,
    b"EXISTS": _exists,
    b"UNLINK": _unlink,
    b"DEL": _unlink,
    b"PEXPIRE": _expire_after,
    b"PTTL": _left,
    b"SCRIPT": _script,
    b"CONFIG": _config,
    b"INFO": _info,
    b"PING": _ping,
    b"GET": _get,
    b"SET": _set,
    b"HGET": _hget,
    b"HSET": _hset,
    b"HSETNX": _hsetnx,
    b"HMGET": _hmget,
    b"HGETALL": _hgetall,
    b"HKEYS": _hkeys,
    b"HVALS": _hvals,
    b"HLEN": _hlen,
    b"HEXISTS": _hexists,
    b"HDEL": _hdel,
    b"HINCRBY": _hincrby,
    b"HSCAN": _hscan,
    b"SADD": _sadd,
}
