from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from turnstream.store.client import keys
from turnstream_server.bus.release.ledger_files import (
    cold_records,
    files_up_to,
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


def test_fork_copies_its_part_of_a_file_beyond_the_fork(
    client: redis.Redis, run: str, new_run: Callable[..., str], tmp_path: Path
) -> None:
    fork = new_run(client)
    files = files_up_to(client, run, 4)
    own = write_ledger_file(tmp_path, fork, range(5, 7), [b"own 5", b"own 6"])
    for last, name in {**files, 6: own}.items():
        client.hset(keys.run_keys(fork).cold, str(last), name)

    found = [read_cold_record(client, fork, step, folder=tmp_path) for step in range(1, 7)]

    expected = [*(RECORDS[step] for step in range(1, 5)), b"own 5", b"own 6"]
    assert found == expected
    assert [*cold_records(client, fork, folder=tmp_path)] == expected
    assert [*files_up_to(client, run, 2)] == [2]
