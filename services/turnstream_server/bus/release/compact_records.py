"""The compact records of a run: batches and ends of finished trajectories."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import redis

from turnstream.records.compact import CompactBatch, decode_batch, decode_ends
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.stored_values import parsed_number, reading
from turnstream.types import TrajectoryKey
from turnstream_server.bus.core.scan import hash_fields
from turnstream_server.bus.release.ledger_files import cold_records, read_cold_record


def read_past_batch(
    client: redis.Redis, run: str, step: int, *, folder: Path | None = None
) -> CompactBatch | None:
    """Return the compact record of a step, from the store or a file of `folder`, or None."""
    with reading(keys.run_keys(run).past), translating():
        record: Any = client.hget(keys.run_keys(run).past, str(step))
    if record is None:
        record = read_cold_record(client, run, step, folder=folder)
    if record is None:
        return None
    with reading(keys.run_keys(run).past, str(step)):
        return decode_batch(record)


def find_past_step(
    client: redis.Redis, run: str, key: TrajectoryKey, *, folder: Path | None = None
) -> int | None:
    """Return the newest step whose compact record names a trajectory, or None.

    A forked run may use a name of its origin again. Files are read after the store.
    """
    past = keys.run_keys(run).past
    hot = (_decoded(past, step, record) for step, record in hash_fields(client, past))
    cold = map(decode_batch, cold_records(client, run, folder=folder))
    return _newest_with(key, hot) or _newest_with(key, cold)


def _decoded(name: str, step: str, record: bytes) -> CompactBatch:
    with reading(name, step):
        return decode_batch(record)


def _newest_with(key: TrajectoryKey, batches: Iterable[CompactBatch]) -> int | None:
    return max((batch.step for batch in batches if key in batch.trajectories), default=None)


def find_past_end(client: redis.Redis, run: str, key: TrajectoryKey) -> str | None:
    """Return "<state>:<reason>" of an untrained trajectory in a compact record, or None."""
    name = keys.run_keys(run).ended
    for number, record in hash_fields(client, name):
        with reading(name, number):
            ended = decode_ends(record)
        if key in ended.trajectories:
            return ended.ends[ended.trajectories.index(key)]
    return None


def past_reasons(client: redis.Redis, run: str) -> Iterator[tuple[str, int]]:
    """Yield "<state>:<reason>" and its number of untrained trajectories in compact records."""
    name = keys.run_keys(run).reasons
    for reason, number in hash_fields(client, name):
        with reading(name, reason):
            count = parsed_number(number)
        yield reason, count
