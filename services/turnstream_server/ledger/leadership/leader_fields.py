"""Fields that a leader writes of its own: time, snapshot, trouble, and its end.

An operator may set the store's clock. So the leader counts with its monotonic clock, and writes
which time of the run was which time of the store. Between two writes the store's clock counts: see
`clock.run_ms`. The time of a run without a leader stands still.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import redis.asyncio

from turnstream.batching.planning.plan_batch import event_order
from turnstream.errors import FencedError
from turnstream.records.snapshots import PlannerSnapshot, decode_snapshot
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.run import clock
from turnstream_server.ledger.core.scan import entry_ms
from turnstream_server.ledger.leadership.writes import (
    Changes,
    Difference,
    Position,
    Term,
    read_facts,
    time_ms,
    write,
    write_decision,
    write_without_facts,
)

LONGEST_MOST_S: Final = 15.0
"""Longest delay of a deadline that starts while the store's clock jumps: see run_clock.lua."""


class ClockFacts(NamedTuple):
    """The fields of the key `clock`, and the field `parked` of `leader`; None for missing ones."""

    ms: bytes | None
    at_ms: bytes | None
    most_ms: bytes | None
    parked: bytes | None = None


class Tick(NamedTuple):
    """The run's time, None at the beginning of a term; the store's; and the most until the next."""

    own_ms: int | None
    server_ms: int
    most_ms: int


def advance_clock(facts: ClockFacts, tick: Tick) -> tuple[int, Changes | None]:
    """Return the run's time in ms, which never decreases, and the writes; None where it stays.

    At the beginning of a term, a short gap since the last term counts. A longer gap may be a clock
    that was set.

    >>> facts = ClockFacts(b"1000", b"5000", b"300")
    >>> advance_clock(facts, Tick(None, 5_200, 300))[0]
    1200
    >>> advance_clock(facts, Tick(None, 9_000_000, 300))[0]
    1000
    >>> advance_clock(facts, Tick(900, 5_200, 300))
    (1000, None)
    """
    known_ms = None if facts.ms is None else int(facts.ms)
    if known_ms is None:
        ms = tick.server_ms if tick.own_ms is None else tick.own_ms
    elif facts.parked is not None or (tick.own_ms is not None and tick.own_ms < known_ms):
        return known_ms, None
    elif tick.own_ms is not None:
        ms = tick.own_ms
    else:
        gap_ms = tick.server_ms - int(facts.at_ms or 0)
        ms = known_ms + (gap_ms if 0 <= gap_ms <= int(facts.most_ms or 0) else 0)
    changes = Changes()
    changes.expect("clock", "ms", facts.ms)
    changes.expect("clock", "at_ms", facts.at_ms)
    changes.expect("leader", "parked", facts.parked)
    fields = ("ms", ms, "at_ms", tick.server_ms, "most_ms", tick.most_ms)
    changes.write("HSET", "clock", *fields)
    return ms, changes


class RunClock:
    """Counts the time of one run during one leadership term.

    Between two ticks at most `most_s` counts. A leader that stood still does not know the deadlines
    that were set in between.
    """

    def __init__(self, term: Term, *, most_s: float) -> None:
        self._term = term
        self._most_s = most_s
        self._ms: float | None = None
        self._ticked_s = 0.0
        self._written: ClockFacts | None = None

    async def tick(self, *, server_ms: int, own_s: float) -> None:
        """Write the time of the run to the store; `server_ms` and `own_s` are of one moment."""
        ms = None if self._ms is None else self._ms + self._since_ms(own_s)
        own_ms = None if ms is None else int(ms)
        tick = Tick(own_ms, server_ms, round(self._most_s * 1_000))
        kept_ms = 0

        def decide(facts: ClockFacts) -> Changes | None:
            nonlocal kept_ms
            kept_ms, changes = advance_clock(facts, tick)
            return changes

        if await write_decision(self._term, self._read, decide) is not None:
            self._written = ClockFacts(_digits(kept_ms), _digits(server_ms), _digits(tick.most_ms))
        self._ms = max(ms or 0, kept_ms)
        self._ticked_s = own_s

    def at(self, own_s: float) -> int:
        """Return the run's time at a time of our own clock, in ms, rounded down."""
        assert self._ms is not None, "a clock tells the time after its first tick"
        return int(self._ms + self._since_ms(own_s))

    def _since_ms(self, own_s: float) -> float:
        return min(own_s - self._ticked_s, self._most_s) * 1_000

    async def _read(self) -> ClockFacts:
        """Return what the last tick has written, so that a tick is one round trip; or read it."""
        written, self._written = self._written, None
        if written is not None:
            return written
        known = keys.run_keys(self._term.run)
        (ms, at_ms, most_ms), parked = await read_facts(
            self._term, ("HMGET", known.clock, *clock.FIELDS), ("HGET", known.leader, "parked")
        )
        return ClockFacts(ms, at_ms, most_ms, parked)


def _digits(number: int) -> bytes:
    return b"%d" % number


Trouble = Literal["planning_trouble", "release_trouble"]
"""The part of its work that a leader cannot do."""


class ParkFacts(NamedTuple):
    """The facts in the store about an idle run; `clock` has the values of `clock.FIELDS`."""

    clock: Sequence[bytes | None]
    observers: dict[bytes, bytes]
    now_ms: int


def park(facts: ParkFacts, position: Position) -> Changes | None:
    """Return the writes that park a run without leases and deadlines; None with a live observer.

    Its time stops, and any later entry of `events` or `wake` makes a planner lead it again. This
    includes entries after `position` that its planner has not read yet.

    >>> facts = ParkFacts([b"1", b"5", b"9"], {b"o": b"3:0:60000"}, now_ms=7)
    >>> list(park(facts, Position("2-0", "0-0")).calls())[-1]
    ('HSET', 'leader', ('expires_ms', 7, 'parked', '2-0 0-0'))
    >>> park(facts._replace(observers={b"o": b"3:70:60000"}), Position("2-0", "0-0")) is None
    True
    """
    if any(entry.split(b":")[1:2] != [b"0"] for entry in facts.observers.values()):
        return None
    changes = Changes()
    changes.expect_empty("leases")
    changes.expect_empty("deadlines")
    changes.expect_hash("observers", facts.observers)
    for name, value in zip(clock.FIELDS, facts.clock, strict=True):
        changes.expect("clock", name, value)
    run_ms = clock.run_ms(facts.clock, now_ms=facts.now_ms)
    changes.write("HSET", "clock", "ms", run_ms, "at_ms", facts.now_ms, "most_ms", 0)
    parked = f"{position.event_id} {position.wake_id}"
    changes.write("HSET", "leader", "expires_ms", facts.now_ms, "parked", parked)
    return changes


async def park_leadership(term: Term, position: Position) -> bool:
    """Release the leadership until a write after `position`; False where something can expire."""
    known = keys.run_keys(term.run)
    fields, observers, now = await read_facts(
        term, ("HMGET", known.clock, *clock.FIELDS), ("HGETALL", known.observers), ("TIME",)
    )
    changes = park(ParkFacts(fields, observers, time_ms(now)), position)
    return changes is not None and not isinstance(await write(term, changes), Difference)


async def note_trouble(term: Term, what: Trouble, trouble: str, *, owner: str) -> bool:
    """Record why a leader cannot work, "" once it is solved; False after the end of its term."""
    changes = Changes()
    changes.expect("leader", "owner", owner.encode())
    if trouble:
        changes.write("HSET", "leader", what, trouble)
    else:
        changes.write("HDEL", "leader", what)
    return not isinstance(await write(term, changes), Difference)


async def release_leadership(term: Term, *, owner: str) -> bool:
    """End the term before its lease ends; return False where it was lost already."""
    changes = Changes()
    changes.expect("leader", "owner", owner.encode())
    changes.write("HSET", "leader", "owner", "", "expires_ms", 0)
    try:
        return not isinstance(await write(term, changes), Difference)
    except FencedError:
        return False


TRIM_SLICE: Final = 500
"""Events of one call, which takes the server a fraction of a millisecond."""

_FACTS: Final = ("position", "step", "withdrawn_at")


async def save_snapshot(term: Term, *, position: str, step: int, record: bytes) -> None:
    """Save the planner's state after the event `position` and the plan of `step`, unless late."""
    snapshot = keys.run_keys(term.run).snapshot

    async def read() -> Any:
        return (await read_facts(term, ("HMGET", snapshot, *_FACTS)))[0]

    await write_decision(
        term, read, lambda facts: saved(facts, position=position, step=step, record=record)
    )


def saved(
    facts: Sequence[bytes | None], *, position: str, step: int, record: bytes
) -> Changes | None:
    """Return the writes of a snapshot; None where a later one is stored, whose fields are known."""
    before, known_step, withdrawn_at = facts
    known = "0-0" if before is None else before.decode()
    if (event_order(known), int(known_step or 0)) > (event_order(position), step):
        return None
    if withdrawn_at == position.encode():
        return None  # a snapshot from before the withdrawal
    changes = Changes()
    for name, value in zip(_FACTS, facts, strict=True):
        changes.expect("snapshot", name, value)
    if known != position:
        changes.write("HSET", "snapshot", "before", known)
    changes.write("HSET", "snapshot", "position", position, "step", step, "record", record)
    return changes


async def read_snapshot(client: redis.asyncio.Redis, run: str) -> PlannerSnapshot | None:
    """Return the snapshot of the run; None before the first."""
    with translating():
        record: Any = await client.execute_command("HGET", keys.run_keys(run).snapshot, "record")
    return None if record is None else await asyncio.to_thread(decode_snapshot, record)


async def trim_events(term: Term) -> int:
    """Remove some events before the last snapshot but one; return their number.

    Other readers need the newer ones. The ids of rejected events are removed with their events.
    """
    known = keys.run_keys(term.run)
    before, oldest = await read_facts(
        term,
        ("HGET", known.snapshot, "before"),
        ("ZRANGE", known.rejected, 0, TRIM_SLICE - 1),
    )
    if before is None:
        return 0
    return sum(await write_without_facts(term, trim(before.decode(), oldest)))


def trim(before: str, oldest: Sequence[bytes]) -> Changes:
    """Return the writes that remove about TRIM_SLICE events before one, and their rejections.

    `oldest` are the ids of the oldest rejected events.

    >>> list(trim("7-0", [b"5-1", b"7-0"]).calls())[0]
    ('ZREM', 'rejected', (b'5-1',))
    """
    changes = Changes()
    first_ms = entry_ms(before)
    old = [each for each in oldest if entry_ms(each.decode()) < first_ms]
    changes.write_each("ZREM", "rejected", old)
    changes.write("XTRIM", "events", "MINID", "~", before, "LIMIT", TRIM_SLICE)
    return changes


async def last_event_id(client: redis.asyncio.Redis, run: str) -> str:
    """Return the id of the newest event; "0-0" before the first."""
    events = keys.run_keys(run).events
    with translating():
        entries: Any = await client.execute_command("XREVRANGE", events, "+", "-", "COUNT", 1)
    return entries[0][0].decode() if entries else "0-0"
