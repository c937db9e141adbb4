"""Compact records of finished trajectories: reads of `past`, `ended` and `reasons`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import redis

from turnstream.records.compact import CompactBatch, decode_batch, decode_ends, names_group
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.stored_values import parsed_number, reading
from turnstream.types import TrajectoryKey
from turnstream_server.ledger.core.scan import hash_fields


def read_past_batch(client: redis.Redis, run: str, step: int) -> CompactBatch | None:
    """Return the compact record of a step, or None."""
    past = keys.run_keys(run).finished_batches
    with reading(past), translating():
        record: Any = client.hget(past, str(step))
    if record is None:
        return None
    with reading(past, str(step)):
        return decode_batch(record)


def find_past_step(client: redis.Redis, run: str, key: TrajectoryKey) -> int | None:
    """Return the step whose compact record names a trajectory, or None."""
    past = keys.run_keys(run).finished_batches
    for step, record in hash_fields(client, past):
        with reading(past, step):
            if names_group(record, key.group_id) and key in decode_batch(record).trajectories:
                return parsed_number(step.encode())
    return None


def past_batches(client: redis.Redis, run: str) -> Iterator[CompactBatch]:
    """Yield the compact records of released batches."""
    past = keys.run_keys(run).finished_batches
    for step, record in hash_fields(client, past):
        with reading(past, step):
            batch = decode_batch(record)
        yield batch


def find_past_end(client: redis.Redis, run: str, key: TrajectoryKey) -> str | None:
    """Return "<state>:<reason>" of an untrained trajectory in a compact record, or None."""
    ended = keys.run_keys(run).untrained
    for number, record in hash_fields(client, ended):
        with reading(ended, number):
            end = decode_ends(record).get(key) if names_group(record, key.group_id) else None
        if end is not None:
            return end
    return None


def past_reasons(client: redis.Redis, run: str) -> Iterator[tuple[str, int]]:
    """Yield "<state>:<reason>" and its number of untrained trajectories in compact records."""
    name = keys.run_keys(run).reasons
    for reason, number in hash_fields(client, name):
        with reading(name, reason):
            count = parsed_number(number)
        yield reason, count


def lost_records(client: redis.Redis, run: str) -> str:
    """Return a sentence on records that an earlier release moved to files; "" for none."""
    cold = keys.run_keys(run).archive_files
    with reading(cold):
        newest = max(
            (parsed_number(step.encode()) for step, _ in hash_fields(client, cold)), default=0
        )
    if not newest:
        return ""
    return (
        f"an earlier release moved the records of steps up to {newest} to files ledger-*.bin in "
        "its archive folder, and this release does not read them"
    )
