"""Trained steps in archives, and records of old batches in files."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import duckdb
import pandas
import polars
import pyarrow.parquet as pq
import pytest

from testkit import group, trajectory, turn, wait_until_async
from turnstream.errors import CorruptRecordError, NotReadyError
from turnstream.store.client import keys
from turnstream.types import TrajectoryState
from turnstream_server.batcher.assembly.archive import archive_path, archive_step
from turnstream_server.batcher.planner import releaser
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.bus.queries.ledger import read_ledger
from turnstream_server.bus.queries.run_snapshot import read_snapshot
from turnstream_server.bus.queries.trajectory_history import TrajectoryNotFoundError, read_history
from turnstream_server.bus.release.compact_records import LedgerFileError, LedgerFolder
from turnstream_server.jobs.batches import archive_run, read_batch


async def train(house, run, *, steps, **batcher):
    trainer = await house.start_trainer(run, **batcher)
    pulled = []
    for step in range(1, steps + 1):
        pulled.append(await trainer.get(step))
        await trainer.train(step)
    return pulled


async def released(house, run, step):
    await wait_until_async(
        lambda: house.frontier(run).released >= step, describe=f"the release of step {step}"
    )


def columns(pulled, name):
    return [value for each in pulled for value in getattr(each.mini_batch.rows, name)]


async def test_the_archive_of_a_step_holds_the_rows_that_were_trained(house, tmp_path):
    run = house.create_run(batch_groups=2, mini_batch_groups=1)
    await house.publish(run, group("a"), group("b"))
    (pulled,) = await train(house, run, steps=1)

    (path,) = await asyncio.to_thread(lambda: list(archive_run(house.url, run, tmp_path)))

    table = pq.read_table(path)
    assert path == archive_path(tmp_path, run, 1)
    assert table["mini_batch"].to_pylist() == [0, 0, 1, 1]
    assert table["trajectory_id"].to_pylist() == columns(pulled, "trajectory_id")
    assert table["reward"].to_pylist() == columns(pulled, "reward")
    assert table["advantage"].to_pylist() == columns(pulled, "advantage")
    ids = [row.tolist() for each in pulled for row in each.mini_batch.rows.input_ids]
    assert table["input_ids"].to_pylist() == ids
    assert table.schema.metadata[b"manifest_hash"].decode() == (
        pulled[0].mini_batch.info.manifest_hash
    )
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"


def unpacked_by_pandas(path):
    columns: Any = ["loss_mask", "rewards"]
    return len(pandas.read_parquet(path)[columns].explode(columns))


def unpacked_by_polars(path):
    return len(
        polars.read_parquet(path).select("loss_mask", "rewards").explode("loss_mask", "rewards")
    )


def unpacked_by_duckdb(path):
    with duckdb.connect() as database:
        query = f"select unnest(loss_mask), unnest(rewards) from '{path}'"
        return len(database.execute(query).fetchall())


@pytest.mark.parametrize(
    "num_unpacked", [unpacked_by_pandas, unpacked_by_polars, unpacked_by_duckdb]
)
async def test_columns_per_token_are_as_long_as_the_response_for_every_reader(
    house, tmp_path, num_unpacked
):
    run = house.create_run(batch_groups=2, mini_batch_groups=1)
    says_more = turn("ab", "CDE", logprobs=-0.5, rewards=1.0, weights=0.25)
    members = [trajectory(says_more, sample=n, reward=float(n)) for n in range(2)]
    await house.publish(run, group("a"), group("b", *members))
    await train(house, run, steps=1)

    (path,) = await asyncio.to_thread(lambda: list(archive_run(house.url, run, tmp_path)))

    table = pq.read_table(path)
    assert table["rewards"].to_pylist() == [[0.0, 0.0]] * 2 + [[0.0, 0.0, 1.0]] * 2
    assert table["logprobs"].to_pylist() == [None, None] + [[-0.5] * 3] * 2
    assert table["token_weights"].to_pylist() == [None, None] + [[0.25] * 3] * 2
    assert num_unpacked(path) == 2 * 2 + 2 * 3


async def test_steps_with_and_without_advantages_of_turns_have_the_same_columns(house, tmp_path):
    one, two = (turn("ab", "CD", anchor="s"), turn("abcde", "F", anchor="t"))
    members = [trajectory(one, sample=0, reward=1.0), trajectory(one, two, sample=1, reward=0.0)]
    tables = []
    for fields in ({}, {"estimator": "gigpo", "turn_discount": 0.0, "divide_by_std": False}):
        run = house.create_run(batch_groups=1, **fields)
        await house.publish(run, group("a", *members))
        await train(house, run, steps=1)
        (path,) = await asyncio.to_thread(
            lambda run=run: list(archive_run(house.url, run, tmp_path))
        )
        tables.append(pq.read_table(path))

    whole, by_turn = tables
    assert whole.schema.remove_metadata() == by_turn.schema.remove_metadata()
    assert whole["advantages"].to_pylist() == [None, None]
    # From "s" the one earns 1 at once, the other 0.
    assert by_turn["advantages"].to_pylist() == [[1.0, 1.0], [-1.0, -1.0, 0.0, -0.5]]


async def test_the_archive_has_the_labels_of_every_trajectory(house, tmp_path):
    run = house.create_run(batch_groups=1)
    labelled = trajectory(sample=0, tags={"env": "maze"}, metrics={"turns": 2})
    await house.publish(run, group("a", labelled, trajectory(sample=1, reward=0.0)))
    await train(house, run, steps=1)
    stream = keys.trajectory_keys(run, "a/1/0").turns
    house.client.execute_command("XDEL", stream, "0-2")  # its seal

    (path,) = await asyncio.to_thread(lambda: list(archive_run(house.url, run, tmp_path)))

    table = pq.read_table(path)
    assert table["tags"].to_pylist() == [[("env", "maze")], None]
    assert table["metrics"].to_pylist() == [[("turns", 2.0)], None]


async def test_nothing_is_released_before_it_is_archived(house, tmp_path):
    run = house.create_run(batch_groups=1, retain_checkpoints=1)
    await house.publish(run, *(group(f"g{i}") for i in range(4)))
    stored = []

    def archive(name, step):
        archive_step(house.url, name, step, folder=tmp_path)
        turns = keys.trajectory_keys(name, f"g{step - 1}/0/0").turns
        frontier = house.frontier(name)
        stored.append((step, house.client.exists(turns), frontier.released < step))

    pulled = await train(house, run, steps=4, upkeep=Upkeep(archive=archive))
    await released(house, run, 4)

    assert stored == [(step, 1, True) for step in range(1, 5)]
    for step, batch in enumerate(pulled, start=1):
        table = pq.read_table(archive_path(tmp_path, run, step))
        assert table["trajectory_id"].to_pylist() == columns(batch, "trajectory_id")


async def test_folder_that_cannot_be_written_delays_the_release(house, tmp_path):
    run = house.create_run(batch_groups=1, retain_checkpoints=1)
    await house.publish(run, *(group(f"g{i}") for i in range(3)))
    tried, space = [], []

    def archive(name, step):
        tried.append(step)
        if step == 2 and not space:
            raise OSError("the disk is full")

    def trouble():
        return read_snapshot(house.client, run).release_trouble

    await train(house, run, steps=3, upkeep=Upkeep(archive=archive))
    await released(house, run, 1)

    await wait_until_async(lambda: tried.count(2) >= 3, describe="another try")
    assert house.frontier(run).released == 1
    assert house.client.exists(keys.trajectory_keys(run, "g1/0/0").turns)
    assert trouble() == "step 2 is not archived: the disk is full"

    space.append(1)
    await released(house, run, 3)
    await wait_until_async(lambda: not trouble(), describe="the end of the trouble")


async def test_defect_of_the_release_hides_no_failed_archive(house, monkeypatch, caplog):
    def archive(name, step):
        raise OSError("the disk is full")

    async def fail(*_):
        raise RuntimeError("a defect")

    monkeypatch.setattr(releaser, "read_release_state", fail)
    run = house.create_run(batch_groups=1)
    await house.publish(run, group("g1"))
    await train(house, run, steps=1, upkeep=Upkeep(archive=archive))

    await wait_until_async(
        lambda: (
            read_snapshot(house.client, run).release_trouble
            == "step 1 is not archived: the disk is full"
        )
    )
    assert f"release in run {run} failed" in caplog.text
    assert house.client.hget(keys.run_keys(run).leader, "epoch") == b"1"


async def test_a_file_of_another_run_of_the_same_name_is_replaced(house, tmp_path):
    run, other = house.create_run(batch_groups=1), house.create_run(batch_groups=1)
    for each in (run, other):
        await house.publish(each, group(f"group of {each}"))
        await train(house, each, steps=1)
    path = archive_path(tmp_path, run, 1)
    found = await asyncio.to_thread(archive_step, house.url, other, 1, folder=tmp_path)
    path.parent.mkdir(exist_ok=True)
    found.rename(path)

    await asyncio.to_thread(archive_step, house.url, run, 1, folder=tmp_path)
    written = path.stat().st_mtime_ns
    await asyncio.to_thread(archive_step, house.url, run, 1, folder=tmp_path)

    assert pq.read_table(path)["group_id"].to_pylist() == [f"group of {run}"] * 2
    assert path.stat().st_mtime_ns == written
    assert [each.name for each in path.parent.iterdir()] == [path.name]


NUM_STEPS = 8


def upkeep(folder: Path | None) -> Upkeep:
    place = None if folder is None else LedgerFolder(folder=folder, hot_batches=2)
    return Upkeep(snapshot_events=1, snapshot_steps=1, ledger_folder=place)


async def train_all(house: Any, batcher_upkeep: Upkeep, *, cold: int) -> str:
    """Train a new run; return it once 7 steps are released, `cold` of them in files."""
    run = house.create_run(batch_groups=1)
    await house.publish(run, *(group(f"g{i}") for i in range(1, NUM_STEPS + 1)))
    await train(house, run, steps=NUM_STEPS, upkeep=batcher_upkeep)
    await reached(house, run, cold=cold)
    return run


async def reached(house: Any, run: str, *, cold: int) -> None:
    frontier = keys.run_keys(run).frontier
    await wait_until_async(
        lambda: (
            house.client.hmget(frontier, "folded", "cold") == [b"7", b"%d" % cold if cold else None]
        ),
        60,
        describe=f"7 folded steps, {cold} in files",
    )


def hot_steps(house: Any, run: str) -> list[int]:
    return sorted(map(int, house.client.hkeys(keys.run_keys(run).past)))


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*"))


@pytest.fixture
async def cooled(house, tmp_path: Path) -> str:
    """A run of eight trained steps: seven are released, the first four of them in two files."""
    return await train_all(house, upkeep(tmp_path), cold=4)


async def test_records_of_old_batches_move_to_files_that_answer_for_them(
    house, cooled: str, tmp_path: Path
):
    batches = [read_batch(house.url, cooled, step, folder=tmp_path) for step in range(1, 8)]
    trained = read_history(house.client, cooled, "g1/1/0", folder=tmp_path)

    assert [batch["step"] for batch in batches] == list(range(1, 8))
    assert [batch["trajectories"][1]["id"] for batch in batches] == [
        f"g{step}/1/0" for step in range(1, 8)
    ]
    assert (trained.state, trained.step) == (TrajectoryState.COMMITTED, 1)
    assert read_history(house.client, cooled, "g6/0/0", folder=None).step == 6
    assert hot_steps(house, cooled) == [5, 6, 7]
    files = sorted(path.name for path in (tmp_path / keys.encode_name(cooled)).iterdir())
    assert [name.rpartition("-")[0] for name in files] == [
        *("ledger-00000001-00000002", "ledger-00000003-00000004"),
    ]
    read_ledger(house.client, cooled).check()
    with pytest.raises(TrajectoryNotFoundError):
        read_history(house.client, cooled, "never/0/0", folder=tmp_path)
    with pytest.raises(NotReadyError):
        read_batch(house.url, cooled, 9, folder=tmp_path)


async def test_without_the_folder_the_answer_says_which_file_it_is_in(
    house, cooled: str, tmp_path: Path
):
    with pytest.raises(LedgerFileError, match=r"ledger-00000003-00000004-.*TURNSTREAM_ARCHIVE_DIR"):
        read_batch(house.url, cooled, 3)
    with pytest.raises(LedgerFileError):
        read_history(house.client, cooled, "never/0/0", folder=None)
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


async def test_folder_that_cannot_be_written_keeps_the_records_in_the_store(
    house, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").touch()
    run = await train_all(house, upkeep(tmp_path / "file"), cold=0)

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
    run = await train_all(house, upkeep(None), cold=0)
    await house.close()

    upkeep_options = {"snapshot_events": 1, "snapshot_steps": 1, "folder": str(tmp_path)}
    doomed = start_batcher_process(f"{act}.before", upkeep=upkeep_options)
    status = await asyncio.to_thread(doomed.wait, 60)
    files = len(files_in(tmp_path))
    still_hot = hot_steps(house, run)
    await house.start_batcher(lease_s=0.6, upkeep=upkeep(tmp_path))
    await reached(house, run, cold=4)

    assert status == -signal.SIGKILL
    assert (files, still_hot) == (int(act == "move_to_file"), list(range(1, 8)))
    assert len(files_in(tmp_path)) == 2
    assert read_batch(house.url, run, 1, folder=tmp_path)["step"] == 1
