"""Single trajectories: their seals, their damage, and those that become dead letters."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any, Final

import redis.asyncio

from turnstream.errors import CorruptRecordError, RecordError
from turnstream.records.events import decode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.types import SealedTrajectory, TrajectoryDied, TrajectoryKey
from turnstream_server.ledger.core.run_script import RunScript
from turnstream_server.ledger.leadership.leadership import Term
from turnstream_server.ledger.leadership.writes import (
    Changes,
    read_facts,
    time_ms,
    write_decision,
)
from turnstream_server.ledger.planning import dead_writes
from turnstream_server.ledger.planning.dead_writes import Rejection, RejectionFacts
from turnstream_server.ledger.planning.ending import Attempt

_NOTE_DAMAGE = RunScript("note_damage", "planning", "frontier batches")
_PAGE: Final = 1_000
_SEALS_PER_REPLY: Final = 256

REJECT_SLICE: Final = 25
"""Rejections of one call, whose events are read whole."""


async def mark_dead(term: Term, died: TrajectoryDied) -> bool:
    """Mark a sealed trajectory as dead, and notify the planner; return False if it was dead.

    Raises:
        ConflictError: it is not sealed, or already in a batch.
    """
    known, name = keys.run_keys(term.run), keys.trajectory_id(died.key)

    async def read() -> Any:
        return await read_facts(
            term, ("HGET", known.ledger, name), ("HGET", known.payload_bytes, name), ("TIME",)
        )

    def decide(facts: Any) -> Changes | None:
        entry, held, now = facts
        return dead_writes.mark_dead(Attempt(name, entry, held), died, now_ms=time_ms(now))

    return await write_decision(term, read, decide) is not None


async def reject_events(term: Term, rejections: Sequence[Rejection]) -> None:
    """Reject events, each once. They, or their trajectories, become dead letters."""
    for start in range(0, len(rejections), REJECT_SLICE):
        some = rejections[start : start + REJECT_SLICE]
        await write_decision(
            term,
            lambda some=some: _read_rejections(term, some),
            lambda facts: dead_writes.reject(facts[0], newest=facts[1], now_ms=facts[2]),
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


async def note_damage(
    client: redis.asyncio.Redis, run: str, *, step: int, manifest_hash: str, sentence: str
) -> None:
    """Record damaged payload of a planned step that a rank was refused, for `turnstream why`."""
    await _NOTE_DAMAGE.call_async(client, run, step, manifest_hash, sentence)


def _read_seal(record: bytes, key: TrajectoryKey) -> SealedTrajectory | RecordError:
    try:
        event = decode_event(record)
    except RecordError as error:
        return error
    if not isinstance(event, SealedTrajectory) or event.key != key:
        return CorruptRecordError(f"another record is in its place: {event}")
    return event
