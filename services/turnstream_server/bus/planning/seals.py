"""Seals of trajectories, read from their payload and the run's events."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Final

import redis.asyncio

from turnstream.errors import CorruptRecordError, RecordError
from turnstream.records.events import decode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.types import RewardPosted, SealedTrajectory, TrajectoryKey
from turnstream_server.bus.core.events import read_events_async

_SLICE: Final = 256
"""Seals of one reply."""


async def read_seals(
    client: redis.asyncio.Redis, run: str, wanted: Sequence[TrajectoryKey]
) -> dict[TrajectoryKey, SealedTrajectory | RecordError]:
    """The seal of each of these trajectories, or why it cannot be read."""
    seals: dict[TrajectoryKey, SealedTrajectory | RecordError] = {}
    for start in range(0, len(wanted), _SLICE):
        some = wanted[start : start + _SLICE]
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
    """The rewards that were posted for these trajectories, as far as events are kept."""
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
        return CorruptRecordError(f"what stands in its place is another record: {event}")
    return event


def _read_reward(record: bytes) -> RewardPosted | None:
    try:
        event = decode_event(record)
    except RecordError:
        return None
    return event if isinstance(event, RewardPosted) else None
