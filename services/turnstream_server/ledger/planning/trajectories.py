"""Single trajectories: their seals, their damage, and the writes that make them dead letters."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import redis.asyncio

from turnstream.batching.planning.plan_batch import event_order
from turnstream.errors import ConflictError, CorruptRecordError, RecordError
from turnstream.records.events import decode_event, encode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.trajectory_names import with_readable_names
from turnstream.types import SealedTrajectory, TrajectoryDied, TrajectoryKey
from turnstream_server.ledger.leadership.writes import (
    Changes,
    Term,
    read_facts,
    time_ms,
    write_decision,
)
from turnstream_server.ledger.planning.settling import Attempt

MAX_KEPT_BYTES: Final = 4_096
"""Bytes of a rejected event's record that are kept, at most."""

MAX_KEPT_EVENTS: Final = 1_000
"""Rejected events of a run that are kept, at most; the oldest are removed."""

REJECT_SLICE: Final = 25
"""Rejections of one call, whose events are read whole."""

_PAGE: Final = 1_000
_SEALS_PER_REPLY: Final = 256
_SEALED: Final = ("sealed", "awaiting_reward")


class Rejection(NamedTuple):
    """An event that counts for nothing, why, and the sealed trajectory that ends by it, if any."""

    event_id: str
    reason: str
    key: TrajectoryKey | None


class RejectionFacts(NamedTuple):
    """The facts in the store about an event to reject; a deleted one has no fields."""

    rejection: Rejection
    attempt: Attempt | None
    fields: Mapping[bytes, bytes]


def write_death(changes: Changes, attempt: Attempt, died: TrajectoryDied, *, now_ms: int) -> None:
    """Add the death of a trajectory: its state, its dead letter and its event.

    >>> changes = Changes()
    >>> died = TrajectoryDied(key=TrajectoryKey("g", 0), reason="checksum")
    >>> write_death(changes, Attempt("g/0/0", b"sealed:1", b"70"), died, now_ms=5)
    >>> [words for _, key, words in changes.calls() if key in ("ledger", "dead_letters")]
    [('g/0/0', b'=sealed:1'), ('g/0/0', 'dead:checksum'), ('g/0/0', '5:70')]
    """
    name, num_bytes = attempt.trajectory_id, attempt.stored_bytes
    changes.expect("ledger", name, attempt.entry)
    changes.write("HSET", "ledger", name, f"dead:{died.reason}")
    changes.write("ZREM", "deadlines", f"reward:{name}")
    changes.write("HSET", "dead_letters", name, f"{now_ms}:{num_bytes}")
    changes.write_entry("events", encode_event(died))
    changes.add("counts", attempt.state, -1)
    changes.add("counts", "dead", 1)
    changes.add("counts", "dead_bytes", num_bytes)


def death(attempt: Attempt, died: TrajectoryDied, *, now_ms: int) -> Changes | None:
    """Return the writes that mark a sealed trajectory as dead; None where it is dead."""
    if attempt.state == "dead":
        return None
    if attempt.state not in _SEALED:
        entry = (attempt.entry or b"unknown").decode(errors="replace")
        raise ConflictError(with_readable_names(f"{attempt.trajectory_id} is {entry}, not sealed"))
    changes = Changes()
    write_death(changes, attempt, died, now_ms=now_ms)
    return changes


def reject(events: Sequence[RejectionFacts], *, newest: Sequence[str], now_ms: int) -> Changes:
    """Return the writes that reject events: no leader folds them from now on.

    A sealed trajectory of an event becomes a dead letter. Any other event is kept itself, unless
    its trajectory is dead.

    `newest` has the ids of the newest event that is kept, and of the newest rejected one. An event
    from before them cannot be added to the kept ones.
    """
    changes = Changes()
    changes.expect_newest("damaged", newest[0])
    last = max(map(event_order, newest))
    dead = set[str]()
    for (event_id, reason, key), attempt, fields in events:
        changes.write("ZADD", "rejected", event_id.partition("-")[0], event_id)
        name = "" if attempt is None else attempt.trajectory_id
        if attempt is not None and key is not None and attempt.state in _SEALED:
            if name not in dead:
                died = TrajectoryDied(key=key, reason=reason)
                write_death(changes, attempt, died, now_ms=now_ms)
            dead.add(name)
        elif (attempt is None or attempt.state != "dead") and event_order(event_id) > last:
            last = event_order(event_id)
            _keep(changes, event_id, reason, fields)
    return changes


def _keep(changes: Changes, event_id: str, reason: str, fields: Mapping[bytes, bytes]) -> None:
    pairs = b"\n".join(word for pair in fields.items() for word in pair)
    record = fields.get(b"r", pairs)
    if len(record) > MAX_KEPT_BYTES:
        reason += f" (the first {MAX_KEPT_BYTES} of {len(record)} bytes are kept)"
    record = record[:MAX_KEPT_BYTES]
    limit = ("MAXLEN", MAX_KEPT_EVENTS)
    changes.write("XADD", "damaged", *limit, event_id, "r", record, "why", reason)


async def mark_dead(term: Term, died: TrajectoryDied) -> bool:
    """Mark a sealed trajectory as dead, and notify the planner; return False if it was dead."""
    known, name = keys.run_keys(term.run), keys.trajectory_id(died.key)

    async def read() -> Any:
        return await read_facts(
            term, ("HGET", known.ledger, name), ("HGET", known.payload_bytes, name), ("TIME",)
        )

    def decide(facts: Any) -> Changes | None:
        entry, held, now = facts
        return death(Attempt(name, entry, held), died, now_ms=time_ms(now))

    return await write_decision(term, read, decide) is not None


async def reject_events(term: Term, rejections: Sequence[Rejection]) -> None:
    """Reject events, each once. They, or their trajectories, become dead letters."""
    for start in range(0, len(rejections), REJECT_SLICE):
        some = rejections[start : start + REJECT_SLICE]
        await write_decision(
            term,
            lambda some=some: _read_rejections(term, some),
            lambda facts: reject(facts[0], newest=facts[1], now_ms=facts[2]),
        )


async def _read_rejections(
    term: Term, rejections: Sequence[Rejection]
) -> tuple[list[RejectionFacts], tuple[str, str], int]:
    """Return the facts about events, the newest kept and the newest rejected one, and the time."""
    known = keys.run_keys(term.run)
    ids = ["" if each.key is None else keys.trajectory_id(each.key) for each in rejections]
    entries, held, kept, rejected, now, *records = await read_facts(
        term,
        ("HMGET", known.ledger, *ids),
        ("HMGET", known.payload_bytes, *ids),
        ("XREVRANGE", known.damaged, "+", "-", "COUNT", 1),
        ("ZRANGE", known.rejected, -1, -1),
        ("TIME",),
        *(("XRANGE", known.events, each.event_id, each.event_id) for each in rejections),
    )
    attempts = map(Attempt, ids, entries, held)
    facts = [
        RejectionFacts(each, attempt if each.key else None, record[0][1] if record else {})
        for each, attempt, record in zip(rejections, attempts, records, strict=True)
    ]
    newest = (kept[0][0] if kept else b"0-0", rejected[0] if rejected else b"0-0")
    return facts, (newest[0].decode(), newest[1].decode()), time_ms(now)


async def read_rejected(client: redis.asyncio.Redis, run: str) -> set[str]:
    """Return the ids of all rejected events of a run that a leader may still read."""
    name, rejected = keys.run_keys(run).rejected, set[str]()
    for start in itertools.count(0, _PAGE):
        with translating():
            page: Any = await client.execute_command("ZRANGE", name, start, start + _PAGE - 1)
        rejected.update(event_id.decode() for event_id in page)
        if len(page) < _PAGE:
            break
    return rejected


async def read_seals(
    client: redis.asyncio.Redis, run: str, wanted: Sequence[TrajectoryKey]
) -> dict[TrajectoryKey, SealedTrajectory | RecordError]:
    """Return the seal of each of these trajectories, or why it cannot be read."""
    seals: dict[TrajectoryKey, SealedTrajectory | RecordError] = {}
    for start in range(0, len(wanted), _SEALS_PER_REPLY):
        some = wanted[start : start + _SEALS_PER_REPLY]
        pipeline = client.pipeline(transaction=False)
        for key in some:
            turns = keys.trajectory_keys(run, keys.trajectory_id(key)).turns
            pipeline.execute_command("XREVRANGE", turns, "+", "-", "COUNT", 1)
        with translating():
            replies = await pipeline.execute()
        records = [entries[0][1][b"r"] if entries else b"" for entries in replies]
        read = await asyncio.to_thread(lambda own=records, of=some: list(map(_read_seal, own, of)))
        seals.update(zip(some, read, strict=True))
    return seals


def _read_seal(record: bytes, key: TrajectoryKey) -> SealedTrajectory | RecordError:
    try:
        event = decode_event(record)
    except RecordError as error:
        return error
    if not isinstance(event, SealedTrajectory) or event.key != key:
        return CorruptRecordError(f"another record is in its place: {event}")
    return event
