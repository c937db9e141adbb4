"""Commands on sorted sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from simulator.values import (
    Command,
    NotSimulatedError,
    StoreError,
    Words,
    ZSet,
    integer,
    score_of,
    shown,
)

if TYPE_CHECKING:
    from simulator.store import Store


def _zadd(store: Store, words: Words) -> int:
    first = 2
    is_new_only = words[2].upper() == b"NX"
    first += is_new_only
    if len(words) == first or (len(words) - first) % 2:
        raise StoreError("ERR syntax error")
    pairs = [(score_of(words[i]), words[i + 1]) for i in range(first, len(words), 2)]
    zset = store.make(words[1], ZSet)
    num_new = 0
    for score, member in pairs:
        if not (is_new_only and member in zset.scores):
            num_new += zset.add(member, score)
    return num_new


def _zrem(store: Store, words: Words) -> int:
    zset = store.get(words[1], ZSet)
    if zset is None:
        return 0
    num_gone = sum([zset.remove(member) for member in words[2:]])
    store.drop_if_empty(words[1], zset)
    return num_gone


def _zscore(store: Store, words: Words) -> Any:
    zset = store.get(words[1], ZSet)
    score = None if zset is None else zset.scores.get(words[2])
    return None if score is None else shown(score)


def _zcard(store: Store, words: Words) -> int:
    return len(store.get(words[1], ZSet) or ())


def _listed(pairs: Sequence[tuple[float, bytes]], with_scores: bool) -> list[bytes]:
    if not with_scores:
        return [member for _, member in pairs]
    return [word for score, member in pairs for word in (member, shown(score))]


def _zrange(store: Store, words: Words) -> list[bytes]:
    options = [word.upper() for word in words[4:]]
    if options not in ([], [b"WITHSCORES"]):
        raise NotSimulatedError(b" ".join(words).decode())
    first, last = integer(words[2]), integer(words[3])
    zset = store.get(words[1], ZSet)
    order = [] if zset is None else zset.order
    first = max(0, first + len(order)) if first < 0 else first
    last = last + len(order) if last < 0 else last
    return _listed(order[first : last + 1], bool(options))


def _bound(word: bytes) -> tuple[float, bool]:
    is_open = word[:1] == b"("
    try:
        return score_of(word[1:] if is_open else word), is_open
    except StoreError:
        raise StoreError("ERR min or max is not a float") from None


def _within(store: Store, words: Words) -> list[tuple[float, bytes]]:
    """The members between the bounds that a command names behind its key."""
    (least, is_above), (most, is_below) = _bound(words[2]), _bound(words[3])
    zset = store.get(words[1], ZSet)
    if zset is None:
        return []
    return [
        pair
        for pair in zset.order
        if (least < pair[0] if is_above else least <= pair[0])
        and (pair[0] < most if is_below else pair[0] <= most)
    ]


def _zrangebyscore(store: Store, words: Words) -> list[bytes]:
    pairs = _within(store, words)
    at = 4
    with_scores = False
    while at < len(words):
        option = words[at].upper()
        if option == b"WITHSCORES":
            with_scores, at = True, at + 1
        elif option == b"LIMIT":
            start, count = integer(words[at + 1]), integer(words[at + 2])
            pairs = pairs[start:] if count < 0 else pairs[start : start + count]
            at += 3
        else:
            raise NotSimulatedError(b" ".join(words).decode())
    return _listed(pairs, with_scores)


def _zremrangebyscore(store: Store, words: Words) -> int:
    gone = _within(store, words)
    zset = store.get(words[1], ZSet)
    for _, member in gone:
        zset.remove(member)
    if gone:
        store.drop_if_empty(words[1], zset)
    return len(gone)


SORTED_SETS: dict[bytes, Command] = {
    b"ZADD": _zadd,
    b"ZREM": _zrem,
    b"ZSCORE": _zscore,
    b"ZCARD": _zcard,
    b"ZRANGE": _zrange,
    b"ZRANGEBYSCORE": _zrangebyscore,
    b"ZREMRANGEBYSCORE": _zremrangebyscore,
}
