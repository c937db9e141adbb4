"""Fields that a leader writes of its own: why it cannot work, and how its term has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from turnstream.errors import FencedError
from turnstream.store.client import keys
from turnstream.store.run import clock
from turnstream_server.ledger.leadership.leadership import Position, Term
from turnstream_server.ledger.leadership.writes import (
    Changes,
    Difference,
    read_facts,
    time_ms,
    write,
)

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
