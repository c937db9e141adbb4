"""Trained steps as files of an archive."""

import asyncio
import functools
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pandas
import polars
import pyarrow.parquet as pq
import pytest

from testkit import group, trajectory, turn, wait_until_async
from turnstream.errors import ReleasedError
from turnstream.store.client import keys
from turnstream_server.batcher.assembly.archive import archive_path, archive_step
from turnstream_server.batcher.planner import releaser
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.console.batches import archive_run, read_batch
from turnstream_server.ledger.queries.run_snapshot import read_snapshot
from turnstream_server.ledger.queries.trajectory_history import (
    TrajectoryNotFoundError,
    read_history,
)


async def train(cluster, run, *, steps, **batcher):
    trainer = await cluster.start_trainer(run, **batcher)
    pulled = []
    for step in range(1, steps + 1):
        pulled.append(await trainer.get(step))
        await trainer.train(step)
    return pulled


async def released(cluster, run, step):
    await wait_until_async(
        lambda: cluster.frontier(run).released >= step, describe=f"the release of step {step}"
    )


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*/*"))


def columns(pulled, name):
    return [value for each in pulled for value in getattr(each.mini_batch.rows, name)]


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


async def test_columns_per_token_are_as_long_as_the_response_for_every_reader(cluster, tmp_path):
    run = cluster.create_run(batch_groups=2, mini_batch_groups=1)
    says_more = turn("ab", "CDE", logprobs=-0.5, rewards=1.0, weights=0.25)
    members = [trajectory(says_more, sample=n, reward=float(n)) for n in range(2)]
    labelled = trajectory(sample=0, tags={"env": "maze"}, metrics={"turns": 2})
    one = group("a", labelled, trajectory(sample=1, reward=0.0))
    await cluster.publish(run, one, group("b", *members))
    (pulled,) = await train(cluster, run, steps=1)
    stream = keys.trajectory_keys(run, "a/1/0").turns
    cluster.client.execute_command("XDEL", stream, "0-2")  # its seal, which has its labels

    (path,) = await asyncio.to_thread(lambda: list(archive_run(cluster.url, run, tmp_path)))

    table = pq.read_table(path)
    assert path == archive_path(tmp_path, run, 1)
    assert table["mini_batch"].to_pylist() == [0, 0, 1, 1]
    for name in ("trajectory_id", "reward", "advantage"):
        assert table[name].to_pylist() == columns(pulled, name)
    ids = [row.tolist() for each in pulled for row in each.mini_batch.rows.input_ids]
    assert table["input_ids"].to_pylist() == ids
    assert table.schema.metadata[b"manifest_hash"].decode() == (
        pulled[0].mini_batch.info.manifest_hash
    )
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"
    assert table["rewards"].to_pylist() == [[0.0, 0.0]] * 2 + [[0.0, 0.0, 1.0]] * 2
    assert table["logprobs"].to_pylist() == [None, None] + [[-0.5] * 3] * 2
    assert table["token_weights"].to_pylist() == [None, None] + [[0.25] * 3] * 2
    assert table["tags"].to_pylist()[:2] == [[("env", "maze")], None]
    assert table["metrics"].to_pylist()[:2] == [[("turns", 2.0)], None]
    for num_unpacked in (unpacked_by_pandas, unpacked_by_polars, unpacked_by_duckdb):
        assert num_unpacked(path) == 2 * 2 + 2 * 3, num_unpacked.__name__


async def test_steps_with_and_without_advantages_of_turns_have_the_same_columns(cluster, tmp_path):
    one, two = (turn("ab", "CD", anchor="s"), turn("abcde", "F", anchor="t"))
    unused = turn("ab", "XYZ", anchor="s", rewards=9.0)  # another answer, which is left out
    second = replace(trajectory(one, unused, two, sample=1, reward=0.0), siblings="mask")
    members = [trajectory(one, sample=0, reward=1.0), second]
    tables = []
    for fields in ({}, {"estimator": "gigpo", "turn_discount": 0.0, "divide_by_std": False}):
        run = cluster.create_run(batch_groups=1, **fields)
        await cluster.publish(run, group("a", *members))
        await train(cluster, run, steps=1)
        (path,) = await asyncio.to_thread(
            lambda run=run: list(archive_run(cluster.url, run, tmp_path))
        )
        tables.append(pq.read_table(path))

    whole, by_turn = tables
    assert whole.schema.remove_metadata() == by_turn.schema.remove_metadata()
    assert whole["advantages"].to_pylist() == [None, None]
    assert [bytes(row) for row in whole["input_ids"].to_pylist()] == [b"abcd", b"abcdef"]
    # From "s" the one earns 1 at once, the other 0.
    assert by_turn["advantages"].to_pylist() == [[1.0, 1.0], [-1.0, -1.0, 0.0, -0.5]]


async def test_nothing_is_released_before_it_is_archived(cluster, tmp_path):
    run = cluster.create_run(batch_groups=1, retain_checkpoints=1)
    await cluster.publish(run, *(group(f"g{i}") for i in range(4)))
    stored = []

    def archive(name, step):
        archive_step(cluster.url, name, step, folder=tmp_path)
        turns = keys.trajectory_keys(name, f"g{step - 1}/0/0").turns
        frontier = cluster.frontier(name)
        stored.append((step, cluster.client.exists(turns), frontier.released < step))

    pulled = await train(cluster, run, steps=4, upkeep=Upkeep(archive=archive))
    await released(cluster, run, 4)

    assert stored == [(step, 1, True) for step in range(1, 5)]
    for step, batch in enumerate(pulled, start=1):
        table = pq.read_table(archive_path(tmp_path, run, step))
        assert table["trajectory_id"].to_pylist() == columns(batch, "trajectory_id")


async def test_folder_that_cannot_be_written_delays_the_release(cluster, tmp_path):
    run = cluster.create_run(batch_groups=1, retain_checkpoints=1)
    await cluster.publish(run, *(group(f"g{i}") for i in range(3)))
    obstacle, tried = archive_path(tmp_path, run, 2), []
    obstacle.mkdir(parents=True)  # a folder is in the place of the file, even for root

    def archive(name, step):
        tried.append(step)
        archive_step(cluster.url, name, step, folder=tmp_path)

    def trouble():
        return read_snapshot(cluster.client, run).release_trouble

    await train(cluster, run, steps=3, upkeep=Upkeep(archive=archive))
    await released(cluster, run, 1)

    await wait_until_async(lambda: tried.count(2) >= 3, describe="another try")
    assert cluster.frontier(run).released == 1
    assert cluster.client.exists(keys.trajectory_keys(run, "g1/0/0").turns)
    assert trouble().startswith("step 2 is not archived: [Errno 21] Is a directory")

    obstacle.rmdir()
    await released(cluster, run, 3)
    await wait_until_async(lambda: not trouble(), describe="the end of the trouble")
    assert files_in(tmp_path) == [f"step-0000000{step}.parquet" for step in range(1, 4)]


async def test_defect_of_the_release_hides_no_failed_archive(cluster, monkeypatch, caplog):
    def archive(name, step):
        raise OSError("the disk is full")

    async def fail(*_):
        raise RuntimeError("a defect")

    monkeypatch.setattr(releaser, "read_release_state", fail)
    run = cluster.create_run(batch_groups=1)
    await cluster.publish(run, group("g1"))
    await train(cluster, run, steps=1, upkeep=Upkeep(archive=archive))

    await wait_until_async(
        lambda: (
            read_snapshot(cluster.client, run).release_trouble
            == "step 1 is not archived: the disk is full"
        )
    )
    assert f"release in run {run} failed" in caplog.text
    assert cluster.client.hget(keys.run_keys(run).leader, "epoch") == b"1"


async def test_a_file_of_another_run_of_the_same_name_is_replaced(cluster, tmp_path):
    run, other = cluster.create_run(batch_groups=1), cluster.create_run(batch_groups=1)
    for each in (run, other):
        await cluster.publish(each, group(f"group of {each}"))
        await train(cluster, each, steps=1)
    path = archive_path(tmp_path, run, 1)
    found = await asyncio.to_thread(archive_step, cluster.url, other, 1, folder=tmp_path)
    path.parent.mkdir(exist_ok=True)
    found.rename(path)

    await asyncio.to_thread(archive_step, cluster.url, run, 1, folder=tmp_path)
    written = path.stat().st_mtime_ns
    await asyncio.to_thread(archive_step, cluster.url, run, 1, folder=tmp_path)

    assert pq.read_table(path)["group_id"].to_pylist() == [f"group of {run}"] * 2
    assert path.stat().st_mtime_ns == written
    assert [each.name for each in path.parent.iterdir()] == [path.name]


async def test_killed_batcher_leaves_no_part_of_a_file(
    cluster: Any, start_batcher_process: Callable[..., Any], tmp_path: Path
) -> None:
    upkeep: dict[str, Any] = {"snapshot_events": 1, "snapshot_steps": 1, "folder": str(tmp_path)}
    run = cluster.create_run(batch_groups=1, retain_checkpoints=1)
    await cluster.publish(run, *(group(f"g{step}") for step in range(1, 6)))

    def refuse(name: str, step: int) -> None:
        raise OSError("another replica will archive it")

    await train(cluster, run, steps=3, upkeep=Upkeep(archive=refuse))
    await cluster.close()

    files: list[list[str]] = []
    for place in ("archive.before_rename", "advance_watermark.before"):
        doomed = start_batcher_process(place, upkeep=upkeep)
        assert await asyncio.to_thread(doomed.wait, 60) == -signal.SIGKILL, place
        files.append(files_in(tmp_path))
        assert cluster.frontier(run).released == 0
    archive = functools.partial(archive_step, cluster.url, folder=tmp_path)
    await cluster.start_batcher(
        lease_s=0.6, upkeep=Upkeep(snapshot_events=1, snapshot_steps=1, archive=archive)
    )
    await released(cluster, run, 3)

    whole = [f"step-0000000{step}.parquet" for step in range(1, 4)]
    assert [each.endswith(".draft") for each in files[0]] == [True]
    assert files[-1] == whole
    assert files_in(tmp_path) == whole
    for step in range(1, 4):
        table = pq.read_table(archive_path(tmp_path, run, step))
        batch = await asyncio.to_thread(read_batch, cluster.url, run, step)
        assert table.schema.metadata[b"manifest_hash"].decode() == batch["manifest_hash"]
        assert set(table["trajectory_id"].to_pylist()) == {f"g{step}/0/0", f"g{step}/1/0"}


async def test_step_that_is_trained_again_after_a_rollback_is_archived_again(cluster: Any) -> None:
    run = cluster.create_run(batch_groups=1, retain_checkpoints=2)
    await cluster.publish(run, *(group(f"g{step}") for step in range(1, 4)))
    archived: list[int] = []
    upkeep = Upkeep(archive=lambda _, step: archived.append(step))
    trainer = cluster.trainer(await cluster.start_batcher(upkeep=upkeep), run)
    await trainer.start("a")
    (token,) = await trainer.train(1)
    await trainer.train(2)
    await wait_until_async(lambda: archived == [1, 2])

    await trainer.start("b", token=str(token))
    await wait_until_async(lambda: cluster.frontier(run).committed == 1)
    await trainer.train(2)

    await wait_until_async(lambda: archived == [1, 2, 2], describe="the file of the other step 2")


async def test_record_that_an_earlier_release_moved_to_a_file_is_named(cluster: Any) -> None:
    run = cluster.create_run(batch_groups=1)
    await cluster.publish(run, *(group(f"g{step}") for step in range(1, 4)))
    await train(cluster, run, steps=3, upkeep=Upkeep(snapshot_events=1, snapshot_steps=1))
    names = keys.run_keys(run)
    await wait_until_async(lambda: cluster.client.hlen(names.finished_batches) == 2)
    with pytest.raises(TrajectoryNotFoundError, match="never had a trajectory 'g0/0/0'"):
        await asyncio.to_thread(read_history, cluster.client, run, "g0/0/0")

    cluster.client.hdel(names.finished_batches, "1")
    cluster.client.hset(names.archive_files, "1", "name/ledger-00000001-00000001-0123456789ab.bin")

    for error, read in (
        (ReleasedError, lambda: read_batch(cluster.url, run, 1)),
        (TrajectoryNotFoundError, lambda: read_history(cluster.client, run, "g1/0/0")),
    ):
        with pytest.raises(error, match=r"records of steps up to 1 to files ledger-\*\.bin"):
            await asyncio.to_thread(read)
    assert (await asyncio.to_thread(read_batch, cluster.url, run, 2))["step"] == 2
