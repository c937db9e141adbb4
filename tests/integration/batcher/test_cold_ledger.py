from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from testkit import group, wait_until_async
from turnstream.errors import CorruptRecordError, NotReadyError
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.types import TrajectoryState
from turnstream_server import cli
from turnstream_server.batcher.planner.upkeep import Upkeep
from turnstream_server.bus.admin.deletion import delete_run
from turnstream_server.bus.admin.forks import fork_run, token_of_step
from turnstream_server.bus.queries.ledger import read_ledger
from turnstream_server.bus.queries.run_snapshot import read_snapshot
from turnstream_server.bus.queries.trajectory_history import TrajectoryNotFoundError, read_history
from turnstream_server.bus.release.ledger_files import LedgerFileError, LedgerFolder
from turnstream_server.jobs.batches import read_batch

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

NUM_STEPS = 8

# A batcher that kills itself before the first act of a kind.
DOOMED = """
import asyncio, os, signal, sys
from pathlib import Path
from turnstream_server.batcher.serving.options import BatcherOptions
from turnstream_server.batcher.serving.service import serving
from turnstream_server.batcher.planner.upkeep import Upkeep
from turnstream_server.bus.release.ledger_files import LedgerFolder

url, folder, act = sys.argv[1:]

async def fall(name):
    if name == act:
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    place = LedgerFolder(folder=Path(folder), hot_batches=2)
    upkeep = Upkeep(snapshot_events=1, snapshot_steps=1, ledger_folder=place, before=fall)
    async with serving(BatcherOptions(redis_url=url, leader_lease_s=0.6, upkeep=upkeep)):
        await asyncio.Event().wait()

asyncio.run(main())
"""


def upkeep(folder: Path | None) -> Upkeep:
    place = None if folder is None else LedgerFolder(folder=folder, hot_batches=2)
    return Upkeep(snapshot_events=1, snapshot_steps=1, ledger_folder=place)


async def train_all(house: Any, trainer: Any, *, first: int = 1, last: int = NUM_STEPS) -> None:
    await house.publish(trainer.run, *(group(f"g{i}") for i in range(first, last + 1)))
    for step in range(first, last + 1):
        await trainer.committed(await trainer.stepped(await trainer.get(step)))


def numbers(house: Any, run: str) -> tuple[int, int]:
    """The newest step that is folded, and the newest in a file."""
    with connect(house.url) as client:
        found: Any = client.hmget(keys.run_keys(run).frontier, "folded", "cold")
    return int(found[0] or 0), int(found[1] or 0)


async def reached(house: Any, run: str, *, folded: int, cold: int) -> None:
    async def check() -> bool:
        return await asyncio.to_thread(numbers, house, run) == (folded, cold)

    await wait_until_async(check, 60, describe=f"{folded} folded steps, {cold} in files")


def hot_steps(house: Any, run: str) -> list[int]:
    with connect(house.url) as client:
        return sorted(map(int, client.hkeys(keys.run_keys(run).past)))


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*"))


def history(house: Any, run: str, trajectory: str, folder: Path | None) -> Any:
    with connect(house.url) as client:
        return read_history(client, run, trajectory, folder=folder)


@pytest.fixture
async def cooled(house, tmp_path: Path) -> str:
    """A run of eight trained steps: seven are over, the first four of them in two files."""
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(upkeep=upkeep(tmp_path)), run)
    await trainer.start()
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
    with connect(house.url) as client:
        read_ledger(client, cooled).check()
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


async def test_the_command_line_asks_the_archive_folder(
    house, cooled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TURNSTREAM_REDIS_URL", house.url)
    monkeypatch.setenv("TURNSTREAM_ARCHIVE_DIR", str(tmp_path))

    batch = CliRunner().invoke(cli.app, ["batch", cooled, "2", "--json"])
    trained = CliRunner().invoke(cli.app, ["ledger", cooled, "g2/0/0", "--json"])

    assert json.loads(batch.output)["trajectories"][0]["id"] == "g2/0/0"
    assert json.loads(trained.output)["step"] == 2


async def test_fork_knows_the_files_of_its_deleted_origin(house, cooled: str, tmp_path: Path):
    new_run = f"{cooled} fork"
    with connect(house.url) as client:
        token = token_of_step(client, cooled, 7)
        fork_run(client, cooled, new_run, token)
        delete_run(client, cooled)
    trainer = house.trainer(await house.start_batcher(upkeep=upkeep(tmp_path)), new_run)
    await trainer.start(token=str(token))
    await train_all(house, trainer, first=8, last=10)
    await reached(house, new_run, folded=9, cold=6)

    batches = [read_batch(house.url, new_run, step, folder=tmp_path) for step in range(1, 10)]
    assert [batch["step"] for batch in batches] == list(range(1, 10))
    assert history(house, new_run, "g1/0/0", tmp_path).step == 1
    assert hot_steps(house, new_run) == [7, 8, 9]


async def test_without_a_folder_everything_stays_in_the_store(house):
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(upkeep=upkeep(None)), run)
    await trainer.start()
    await train_all(house, trainer)

    await reached(house, run, folded=7, cold=0)
    assert hot_steps(house, run) == list(range(1, 8))


async def test_a_folder_that_cannot_be_written_leaves_the_records_where_they_are(
    house, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").touch()
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(upkeep=upkeep(tmp_path / "file")), run)
    await trainer.start()
    await train_all(house, trainer)

    await reached(house, run, folded=7, cold=0)
    assert hot_steps(house, run) == list(range(1, 8))

    async def is_told() -> bool:
        return "stays in the store" in caplog.text

    await wait_until_async(is_told)

    async def is_noted() -> bool:
        with connect(house.url) as client:
            trouble = read_snapshot(client, run).release_trouble
        return trouble.startswith("the ledger stays in the store: ")

    await wait_until_async(is_noted, describe="the trouble that `turnstream why` tells")
    assert read_batch(house.url, run, 1)["step"] == 1


@pytest.mark.parametrize("act", ["write_ledger_file", "move_to_file"])
async def test_successor_of_a_leader_killed_while_moving_records_moves_them(
    house_at, own_server, tmp_path: Path, act: str
):
    house = house_at(own_server.url)
    run = house.create_run(batch_groups=1)
    first = await house.start_batcher(upkeep=upkeep(None))
    trainer = house.trainer(first, run)
    await trainer.start()
    await train_all(house, trainer)
    await reached(house, run, folded=7, cold=0)
    await first.stop()

    doomed = await asyncio.to_thread(
        lambda: subprocess.run(
            [sys.executable, "-c", DOOMED, house.url, str(tmp_path), act], check=False, timeout=60
        )
    )
    files = len(files_in(tmp_path))
    still_hot = hot_steps(house, run)
    await house.start_batcher(lease_s=0.6, upkeep=upkeep(tmp_path))
    await reached(house, run, folded=7, cold=4)

    assert doomed.returncode == -signal.SIGKILL
    assert (files, still_hot) == (int(act == "move_to_file"), list(range(1, 8)))
    assert len(files_in(tmp_path)) == 2
    assert read_batch(house.url, run, 1, folder=tmp_path)["step"] == 1
