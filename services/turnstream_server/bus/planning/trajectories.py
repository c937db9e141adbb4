"""Single trajectories of a plan: their seals and rewards, and those that become dead letters."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

import redis.asyncio

from turnstream.errors import CorruptRecordError, RecordError
from turnstream.records.events import decode_event, encode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.types import RewardPosted, SealedTrajectory, TrajectoryDied, TrajectoryKey
from turnstream_server.bus.core.scan import read_events_async
from turnstream_server.bus.leadership.leadership import LeaderScript, Term

_MARK_DEAD = LeaderScript("mark_dead", "planning", "ledger counts events letters deadlines held")
_REJECT_EVENTS = LeaderScript(
    "reject_events", "planning", "ledger counts events letters deadlines held damaged rejected"
)
_PAGE: Final = 1_000
_SEALS_PER_REPLY: Final = 256

MAX_KEPT_BYTES: Final = 4_096
"""Bytes of a rejected event's record that are kept, at most."""

MAX_KEPT_EVENTS: Final = 1_000
"""Rejected events of a run that are kept, at most; the oldest are removed."""

_REJECT_SLICE: Final = 25
"""Rejections of one call, for which the server copies each event whole."""


class Rejection(NamedTuple):
    """An event that counts for nothing, why, and the sealed trajectory that ends by it, if any."""

    event_id: str
    reason: str
    key: TrajectoryKey | None


async def mark_dead(term: Term, died: TrajectoryDied) -> bool:
    """Mark a sealed trajectory as dead, and notify the planner; return False if it was dead.

    Raises:
        ConflictError: it is not sealed, or already in a batch.
    """
    words = (keys.trajectory_id(died.key), died.reason, encode_event(died))
    return bool(await _MARK_DEAD.run(term, *words))


async def reject_events(term: Term, rejections: Sequence[Rejection]) -> int:
    """Reject events, each once; return how many were rejected now.

    They, or their trajectories, become dead letters.
    """
    num_new = 0
    for start in range(0, len(rejections), _REJECT_SLICE):
        words: list[str | bytes] = []
        for each in rejections[start : start + _REJECT_SLICE]:
            words += (each.event_id, each.reason)
            if each.key is None:
                words += ("", b"")
            else:
                died = TrajectoryDied(key=each.key, reason=each.reason)
                words += (keys.trajectory_id(each.key), encode_event(died))
        num_new += await _REJECT_EVENTS.run(term, MAX_KEPT_BYTES, MAX_KEPT_EVENTS, *words)
    return num_new


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


async def read_posted_rewards(
    client: redis.asyncio.Redis, run: str, wanted: Collection[TrajectoryKey]
) -> dict[TrajectoryKey, RewardPosted]:
    """Return the rewards that were posted for these trajectories, as far as events are kept."""
    posted: dict[TrajectoryKey, RewardPosted] = {}
    after = "0-0"
    while wanted and (entries := await read_events_async(client, run, after=after)):
        for entry in entries:
            event = _read_reward(entry.record) if entry.posted_for else None
            if event is not None and event.key in wanted:
                posted.setdefault(event.key, event)
        after = entries[-1].event_id
        await asyncio.sleep(0)
    return posted


def _read_seal(record: bytes, key: TrajectoryKey) -> SealedTrajectory | RecordError:
    try:
        event = decode_event(record)
    except RecordError as error:
        return error
    if not isinstance(event, SealedTrajectory) or event.key != key:
        return CorruptRecordError(f"another record is in its place: {event}")
    return event


def _read_reward(record: bytes) -> RewardPosted | None:
    try:
        event = decode_event(record)
    except RecordError:
        return None
    return event if isinstance(event, RewardPosted) else None
