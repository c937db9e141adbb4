from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from testkit import group, wait_until_async
from turnstream.errors import CorruptRecordError, NotReadyError
from turnstream.store.client import keys
from turnstream.types import TrajectoryState
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.bus.queries.ledger import read_ledger
from turnstream_server.bus.queries.run_snapshot import read_snapshot
from turnstream_server.bus.queries.trajectory_history import TrajectoryNotFoundError, read_history
from turnstream_server.bus.release.compact_records import LedgerFileError, LedgerFolder
from turnstream_server.jobs.batches import read_batch

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

NUM_STEPS = 8


def upkeep(folder: Path | None) -> Upkeep:
    place = None if folder is None else LedgerFolder(folder=folder, hot_batches=2)
    return Upkeep(snapshot_events=1, snapshot_steps=1, ledger_folder=place)


async def train_all(house: Any, trainer: Any) -> None:
    await house.publish(trainer.run, *(group(f"g{i}") for i in range(1, NUM_STEPS + 1)))
    await trainer.train(*range(1, NUM_STEPS + 1))


def numbers(house: Any, run: str) -> tuple[int, int]:
    """The newest step that is folded, and the newest in a file."""
    found: Any = house.client.hmget(keys.run_keys(run).frontier, "folded", "cold")
    return int(found[0] or 0), int(found[1] or 0)


async def reached(house: Any, run: str, *, folded: int, cold: int) -> None:
    await wait_until_async(
        lambda: numbers(house, run) == (folded, cold),
        60,
        describe=f"{folded} folded steps, {cold} in files",
    )


def hot_steps(house: Any, run: str) -> list[int]:
    return sorted(map(int, house.client.hkeys(keys.run_keys(run).past)))


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*"))


def history(house: Any, run: str, trajectory: str, folder: Path | None) -> Any:
    return read_history(house.client, run, trajectory, folder=folder)


@pytest.fixture
async def cooled(house, tmp_path: Path) -> str:
    """A run of eight trained steps: seven are released, the first four of them in two files."""
    run = house.create_run(batch_groups=1)
    trainer = await house.start_trainer(run, upkeep=upkeep(tmp_path))
    await train_all(house, trainer)
    await reached(house, run, folded=7, cold=4)
    return run


async def test_records_of_old_batches_move_to_files_that_answer_for_them(
    house, cooled: str, tmp_path: Path
):
    batches = [read_batch(house.url, cooled, step, folder=tmp_path) for step in range(1, 8)]
    trained = history(house, cooled, "g1/1/0", tmp_path)

    assert [batch["step"] for batch in batches] == list(range(1, 8))
    assert [batch["trajectories"][1]["id"] for batch in batches] == [
        f"g{step}/1/0" for step in range(1, 8)
    ]
    assert (trained.state, trained.step) == (TrajectoryState.COMMITTED, 1)
    assert history(house, cooled, "g6/0/0", None).step == 6
    assert hot_steps(house, cooled) == [5, 6, 7]
    files = sorted(path.name for path in (tmp_path / keys.encode_name(cooled)).iterdir())
    assert [name.rpartition("-")[0] for name in files] == [
        *("ledger-00000001-00000002", "ledger-00000003-00000004"),
    ]
    read_ledger(house.client, cooled).check()
    with pytest.raises(TrajectoryNotFoundError):
        history(house, cooled, "never/0/0", tmp_path)
    with pytest.raises(NotReadyError):
        read_batch(house.url, cooled, 9, folder=tmp_path)


async def test_without_the_folder_the_answer_says_which_file_it_is_in(
    house, cooled: str, tmp_path: Path
):
    with pytest.raises(LedgerFileError, match=r"ledger-00000003-00000004-.*TURNSTREAM_ARCHIVE_DIR"):
        read_batch(house.url, cooled, 3)
    with pytest.raises(LedgerFileError):
        history(house, cooled, "never/0/0", None)
    with pytest.raises(LedgerFileError, match="No such file"):
        read_batch(house.url, cooled, 3, folder=tmp_path / "elsewhere")


async def test_a_damaged_file_is_found_by_its_checksum(house, cooled: str, tmp_path: Path):
    for path in [path for path in files_in(tmp_path) if "ledger-00000001-" in path.name]:
        content = bytearray(path.read_bytes())
        content[-20] ^= 1
        path.write_bytes(content)

    with pytest.raises(CorruptRecordError, match="checksum"):
        read_batch(house.url, cooled, 2, folder=tmp_path)
    assert read_batch(house.url, cooled, 4, folder=tmp_path)["step"] == 4


async def test_a_folder_that_cannot_be_written_leaves_the_records_where_they_are(
    house, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").touch()
    run = house.create_run(batch_groups=1)
    trainer = await house.start_trainer(run, upkeep=upkeep(tmp_path / "file"))
    await train_all(house, trainer)

    await reached(house, run, folded=7, cold=0)
    assert hot_steps(house, run) == list(range(1, 8))

    await wait_until_async(lambda: "stays in the store" in caplog.text)
    await wait_until_async(
        lambda: "the ledger stays in" in read_snapshot(house.client, run).release_trouble,
        describe="the error that `turnstream why` reports",
    )
    assert read_batch(house.url, run, 1)["step"] == 1


@pytest.mark.parametrize("act", ["write_ledger_file", "move_to_file"])
async def test_successor_of_a_leader_killed_while_moving_records_moves_them(
    house, start_batcher_process, tmp_path: Path, act: str
):
    run = house.create_run(batch_groups=1)
    first = await house.start_batcher(upkeep=upkeep(None))
    trainer = house.trainer(first, run)
    await trainer.start()
    await train_all(house, trainer)
    await reached(house, run, folded=7, cold=0)
    await first.stop()

    upkeep_options = {"snapshot_events": 1, "snapshot_steps": 1, "folder": str(tmp_path)}
    doomed = start_batcher_process(f"{act}.before", upkeep=upkeep_options)
    status = await asyncio.to_thread(doomed.wait, 60)
    files = len(files_in(tmp_path))
    still_hot = hot_steps(house, run)
    await house.start_batcher(lease_s=0.6, upkeep=upkeep(tmp_path))
    await reached(house, run, folded=7, cold=4)

    assert status == -signal.SIGKILL
    assert (files, still_hot) == (int(act == "move_to_file"), list(range(1, 8)))
    assert len(files_in(tmp_path)) == 2
    assert read_batch(house.url, run, 1, folder=tmp_path)["step"] == 1
