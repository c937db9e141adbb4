from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from turnstream.records.compact import CompactBatch, encode_batch
from turnstream.store.client import keys
from turnstream.types import TrajectoryKey
from turnstream_server.bus.release.compact_records import (
    LedgerFolder,
    find_past_step,
    read_past_batch,
    write_ledger_file,
)

pytestmark = [pytest.mark.redis]

KEY = TrajectoryKey("g", 0)


def batch(step: int, *, by: str) -> CompactBatch:
    """Return a batch that the origin ("") or a fork planned; both have the same trajectory."""
    return CompactBatch(
        step=step, manifest_hash=f"h{step}", lineage=by, trajectories=(KEY,), crcs=(1,)
    )


def write(client: redis.Redis, run: str, folder: Path, steps: range, *, by: str = "") -> None:
    records = [encode_batch(batch(step, by=by)) for step in steps]
    name = write_ledger_file(folder, run, steps, records)
    client.hset(keys.run_keys(run).cold, str(steps[-1]), name)


def test_each_record_is_found_in_the_first_file_with_its_step(
    client: redis.Redis, new_run: Callable[..., str], tmp_path: Path
) -> None:
    run = new_run(client)
    write(client, run, tmp_path, range(1, 3))
    write(client, run, tmp_path, range(3, 6))
    write(client, run, tmp_path, range(4, 8), by="fork")

    found = [read_past_batch(client, run, step, folder=tmp_path) for step in range(9)]

    assert found == [
        None,
        *(batch(step, by="") for step in range(1, 6)),
        *(batch(step, by="fork") for step in range(6, 8)),
        None,
    ]
    assert find_past_step(client, run, KEY, folder=tmp_path) == 7


@pytest.mark.parametrize(
    ("hot_batches", "cold", "folded", "steps"),
    [
        (2, 0, 3, range(0)),  # one batch is not hot, and a file takes two
        (2, 0, 4, range(1, 3)),
        (2, 2, 5, range(0)),
        (2, 2, 6, range(3, 5)),
        (1000, 0, 1255, range(0)),
        (1000, 0, 1256, range(1, 257)),
    ],
)
def test_file_is_due_when_its_batches_are_older_than_the_hot_ones(
    hot_batches: int, cold: int, folded: int, steps: range
) -> None:
    place = LedgerFolder(folder=Path("archive"), hot_batches=hot_batches)

    assert [*place.next_steps(cold=cold, folded=folded)] == [*steps]
