from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from turnstream.store.client import keys
from turnstream_server.bus.release.ledger_files import (
    cold_records,
    read_cold_record,
    write_ledger_file,
)

pytestmark = [pytest.mark.redis]

RECORDS = {step: b"record %d" % step for step in range(1, 8)}


@pytest.fixture
def run(client: redis.Redis, new_run: Callable[..., str], tmp_path: Path) -> str:
    """A run with the files 1 to 2 and 3 to 5."""
    run = new_run(client)
    for steps in (range(1, 3), range(3, 6)):
        name = write_ledger_file(tmp_path, run, steps, [RECORDS[step] for step in steps])
        client.hset(keys.run_keys(run).cold, str(steps[-1]), name)
    return run


def test_each_record_is_found_in_its_file(client: redis.Redis, run: str, tmp_path: Path) -> None:
    found = [read_cold_record(client, run, step, folder=tmp_path) for step in range(7)]

    assert found == [None, *(RECORDS[step] for step in range(1, 6)), None]
    assert [*cold_records(client, run, folder=tmp_path)] == [RECORDS[step] for step in range(1, 6)]


def test_files_with_the_same_steps_yield_each_record_once(
    client: redis.Redis, run: str, tmp_path: Path
) -> None:
    steps = range(4, 8)
    own = write_ledger_file(tmp_path, run, steps, [RECORDS[step] for step in steps])
    client.hset(keys.run_keys(run).cold, "7", own)

    assert [*cold_records(client, run, folder=tmp_path)] == [RECORDS[step] for step in range(1, 8)]
