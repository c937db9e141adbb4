"""The compact records of a run: what is still known of what is over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import redis

from turnstream.records.compact import CompactBatch, decode_batch, decode_ends
from turnstream.store import keys
from turnstream.store.replies import translating
from turnstream.types import TrajectoryKey
from turnstream_server.bus.cold import cold_records, read_cold_record
from turnstream_server.bus.pages import hash_fields


def read_past_batch(
    client: redis.Redis, run: str, step: int, *, folder: Path | None = None
) -> CompactBatch | None:
    """What is left of a step; None where it has no compact record.

    Args:
        client: of the store.
        run: name of the run.
        step: number of the batch.
        folder: the archive folder, where records of old batches may be.

    Raises:
        LedgerFileError: its record is in a file, and that is not at hand.
        CorruptRecordError: the stored bytes are damaged.
        StoreUnavailableError: the store cannot be reached.
    """
    with translating():
        record: Any = client.hget(keys.run_keys(run).past, str(step))
    if record is None:
        record = read_cold_record(client, run, step, folder=folder)
    return None if record is None else decode_batch(record)


def find_past_step(
    client: redis.Redis, run: str, key: TrajectoryKey, *, folder: Path | None = None
) -> int | None:
    """The step that a trajectory was trained in, if a compact record names it: all are looked at.

    The newest one: a forked run may use a name again that its origin had. Files of old batches are
    looked at last.

    Args:
        client: of the store.
        run: name of the run.
        key: of the trajectory.
        folder: the archive folder, where records of old batches may be.

    Raises:
        LedgerFileError: it may be in a file that is not at hand.
        CorruptRecordError: the stored bytes are damaged.
        StoreUnavailableError: the store cannot be reached.
    """
    hot = (record for _, record in hash_fields(client, keys.run_keys(run).past))
    step = _newest_with(key, hot)
    return step or _newest_with(key, cold_records(client, run, folder=folder))


def _newest_with(key: TrajectoryKey, records: Iterable[bytes]) -> int | None:
    batches = map(decode_batch, records)
    return max((batch.step for batch in batches if key in batch.trajectories), default=None)


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
