"""The compact records of a run: what is still known of what is over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import redis

from turnstream.records.compact import CompactBatch, decode_batch, decode_ends
from turnstream.store import keys
from turnstream.store.replies import translating
from turnstream.types import TrajectoryKey
from turnstream_server.bus.pages import hash_fields


def read_past_batch(client: redis.Redis, run: str, step: int) -> CompactBatch | None:
    """What is left of a step; None where it has no compact record.

    Raises:
        CorruptRecordError: the stored bytes are damaged.
        StoreUnavailableError: the store cannot be reached.
    """
    with translating():
        record: Any = client.hget(keys.run_keys(run).past, str(step))
    return None if record is None else decode_batch(record)


def find_past_step(client: redis.Redis, run: str, key: TrajectoryKey) -> int | None:
    """The step that a trajectory was trained in, if a compact record names it: all are looked at.

    The newest one: a forked run may use a name again that its origin had.

    Raises:
        CorruptRecordError: the stored bytes are damaged.
        StoreUnavailableError: the store cannot be reached.
    """
    steps = [
        batch.step
        for _, record in hash_fields(client, keys.run_keys(run).past)
        if key in (batch := decode_batch(record)).trajectories
    ]
    return max(steps, default=None)


def find_past_end(client: redis.Redis, run: str, key: TrajectoryKey) -> str | None:
    """What the ledger said, "<state>:<reason>", of what ended untrained and is compact; else None.

    Raises:
        CorruptRecordError: the stored bytes are damaged.
        StoreUnavailableError: the store cannot be reached.
    """
    for _, record in hash_fields(client, keys.run_keys(run).ended):
        ended = decode_ends(record)
        if key in ended.trajectories:
            return ended.ends[ended.trajectories.index(key)]
    return None


def past_reasons(client: redis.Redis, run: str) -> Iterator[tuple[str, int]]:
    """("<state>:<reason>", number) of what ended untrained and is compact.

    Raises:
        StoreUnavailableError: the store cannot be reached.
    """
    for reason, number in hash_fields(client, keys.run_keys(run).reasons):
        yield reason, int(number)
