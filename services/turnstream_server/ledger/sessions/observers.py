"""Observers: consumers that see the trainer's batches and drive nothing.

The HTTP API describes an observer with the words of its class.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

import redis
import redis.asyncio
from pydantic import Field

from turnstream.errors import InvalidConfigError
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.stored_values import damaged, reading
from turnstream.store.run import clock
from turnstream_server.ledger.core.scan import RunScript, hash_fields, server_ms
from turnstream_server.ledger.leadership.writes import Changes, Term, read_facts, write_decision

logger = logging.getLogger(__name__)

_OBSERVE = RunScript("observe", "sessions", "frontier observers clock wake")
_OBSERVED = RunScript("observed", "sessions", "frontier observers clock")

MOST_OF_OWNER: Final = 64
"""Limit of observers that the keys of one name have in a run."""

MOST_OBSERVERS: Final = 256
"""Limit of observers of a run. Expired ones do not count."""

MOST_EXPIRY_S: Final = 7 * 86_400.0
"""Longest expiry: so long a silent observer keeps the payload of a run."""

MOST_FORGOTTEN: Final = 256
"""Limit of expired observers whose last step is stored."""


_ENTRY: Final = re.compile(r"(\d+):(\d+):(\d+)(?::(\d*))?(@.*)?")
"""Newest step seen, expiry, its length, the first missed step, and the owner."""


class Expired(NamedTuple):
    """An observer that was silent for too long, by its name in keys."""

    name: str
    seen: int
    expiry_ms: int


class Expiry(NamedTuple):
    """The result of a check of all observers.

    Attributes:
        next_ms: ms until the next one expires; -1 where none is left.
        expired: those that have expired since the last check.
        changes: the writes that expire them; None for none.
    """

    next_ms: int
    expired: tuple[Expired, ...]
    changes: Changes | None


class Declared(NamedTuple):
    """The first step that an observer has not seen, and the first that it missed; 0 for none."""

    next_step: int
    first_missed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Observer:
    """A consumer in addition to the trainer."""

    name: str
    owner: Annotated[str, Field(description="Owner of its API key; empty if it is unknown.")]
    seen: Annotated[int, Field(description="Newest step that it has seen.")]
    silent_s: Annotated[float, Field(description="Seconds since its last call.")]
    left_s: Annotated[
        float, Field(description="Seconds until it expires; at 0 or below it has expired.")
    ]


def read_observers(client: redis.Redis, run: str) -> tuple[Observer, ...]:
    """Return the observers of a run, sorted; also expired ones that are still known."""
    names = keys.run_keys(run)
    found = dict(hash_fields(client, names.observers))
    with reading(names.clock), translating():
        fields: Any = client.hmget(names.clock, *clock.FIELDS)
        run_ms = clock.run_ms(fields, now_ms=server_ms(client))
    observers: list[Observer] = []
    for name in sorted(found):
        with reading(names.observers, name):
            numbers, _, owner = found[name].decode().partition("@")
            seen, expires_ms, expiry_ms = map(int, numbers.split(":")[:3])
            left_ms = (expires_ms or run_ms) - run_ms
            observer = Observer(
                name=keys.decode_name(name),
                owner=owner,
                seen=seen,
                silent_s=max(0, expiry_ms - left_ms) / 1_000,
                left_s=left_ms / 1_000,
            )
        observers.append(observer)
    return tuple(observers)


async def declare_observer(
    client: redis.asyncio.Redis,
    run: str,
    *,
    observer: str,
    first_step: int | None,
    expiry_s: float,
    owner: str = "local",
    is_admin: bool = True,
) -> Declared:
    """Declare an observer, or resume one at its next step; an expired one restarts.

    A new observer starts at `first_step`, or after the last stepped one. It expires after
    `expiry_s` of silence. It belongs to `owner`, and an admin may use it, too.

    Raises:
        InvalidConfigError: no name, or an invalid expiry or step.
        RejectedError: too many observers, or a step after the next one to plan.
        ConflictError: it belongs to another owner.
        ReleasedError: its first step is no longer retained.
    """
    if not observer:
        raise InvalidConfigError("observer", "an observer needs a name")
    if not 0.001 <= expiry_s <= MOST_EXPIRY_S:
        raise InvalidConfigError(
            "expiry_s", f"{expiry_s} is not from 0.001 to {MOST_EXPIRY_S:g} seconds"
        )
    if first_step is not None and first_step < 1:
        raise InvalidConfigError("first_step", f"{first_step}; steps count from 1")
    words = (keys.encode_name(observer), first_step or 0, int(expiry_s * 1000))
    caller = (owner, int(is_admin), MOST_OF_OWNER, MOST_OBSERVERS)
    return Declared(*await _OBSERVE.call_async(client, run, *words, *caller))


async def note_observed(
    client: redis.asyncio.Redis,
    run: str,
    *,
    observer: str,
    seen: int = 0,
    asks: int = 0,
    owner: str = "local",
    is_admin: bool = True,
) -> float:
    """Record that an observer is alive, and its newest seen and requested step; 0 for none.

    Returns:
        Its expiry in seconds.

    Raises:
        ObserverExpiredError: it was silent for too long, was removed, or never declared.
        ConflictError: it belongs to another owner.
        StoreBehindError: the step that it has seen is not planned.
    """
    words = (keys.encode_name(observer), seen, asks, owner, int(is_admin))
    expiry_ms: int = await _OBSERVED.call_async(client, run, *words)
    return expiry_ms / 1000


def remove_observer(client: redis.Redis, run: str, observer: str) -> bool:
    """Remove an observer: no step is kept for it; return whether it was there."""
    names = keys.run_keys(run)
    with translating():
        is_removed: Any = client.hdel(names.observers, keys.encode_name(observer))
        if is_removed:
            client.xadd(names.wake, {"w": ""}, maxlen=1, approximate=False)
    return bool(is_removed)


def expire(entries: Mapping[bytes, bytes], *, run_ms: int, most_kept: int) -> Expiry:
    """Return the observers that have expired at a time of the run, and what is written of them.

    No step is kept for them. The newest step that they had seen stays stored, for `most_kept`.

    Raises:
        CorruptRecordError: an entry is damaged.

    >>> found = expire({b"o": b"7:50:40@lab", b"p": b"3:90:40"}, run_ms=50, most_kept=9)
    >>> found.next_ms, found.expired
    (40, (Expired(name='o', seen=7, expiry_ms=40),))
    >>> list(found.changes.calls())[1]
    ('HSET', 'observers', ('o', '7:0:40@lab'))
    """
    changes, expired = Changes(), list[Expired]()
    left_ms: list[int] = []
    gone: list[tuple[int, str]] = []
    for field, entry in entries.items():
        name = field.decode()
        found = _ENTRY.fullmatch(entry.decode(errors="replace"))
        if found is None:
            raise damaged("observers", name, "it is no entry of an observer")
        seen, expires_ms, expiry_ms = map(int, found.group(1, 2, 3))
        if expires_ms > run_ms:
            left_ms.append(expires_ms - run_ms)
            continue
        changes.expect("observers", name, entry)
        if expires_ms:
            seen = int(found[4]) - 1 if found[4] else seen
            expired.append(Expired(name, seen, expiry_ms))
            changes.write("HSET", "observers", name, f"{seen}:0:{expiry_ms}{found[5] or ''}")
        gone.append((seen, name))
    dropped = [name for _, name in sorted(gone, reverse=True)[most_kept:]]
    changes.write_each("HDEL", "observers", dropped)
    next_ms = min(left_ms, default=-1)
    return Expiry(next_ms, tuple(expired), changes if expired or dropped else None)


async def forget_observers(term: Term, *, run_ms: int) -> int:
    """Expire silent observers at a time of the run's clock, and log them.

    Returns:
        Milliseconds until the next one expires; -1 where there is none.

    Raises:
        CorruptRecordError: an entry is damaged.
        FencedError: another planner leads the run.
    """
    found = Expiry(-1, (), None)

    async def read() -> Mapping[bytes, bytes]:
        return (await read_facts(term, ("HGETALL", keys.run_keys(term.run).observers)))[0]

    def decide(entries: Mapping[bytes, bytes]) -> Changes | None:
        nonlocal found
        found = expire(entries, run_ms=run_ms, most_kept=MOST_FORGOTTEN)
        return found.changes

    await write_decision(term, read, decide)
    for each in found.expired:
        logger.warning(
            "run %s: observer %r was silent for %g s; nothing after step %d is kept for it",
            term.run,
            keys.decode_name(each.name),
            each.expiry_ms / 1_000,
            each.seen,
        )
    return found.next_ms
