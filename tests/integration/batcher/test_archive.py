import asyncio
import functools
from typing import Any

import duckdb
import pandas
import polars
import pyarrow.parquet as pq
import pytest

from testkit import group, trajectory, turn, wait_until_async
from turnstream.store.client import keys
from turnstream_server.batcher.assembly.archive import archive_path, archive_step
from turnstream_server.batcher.planner import releaser
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.bus.queries.run_snapshot import read_snapshot
from turnstream_server.jobs.batches import archive_run

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


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
    says_more = turn("ab", "CDE", logprobs=-0.5, rewards=1.0)
    members = [trajectory(says_more, sample=n, reward=float(n)) for n in range(2)]
    await house.publish(run, group("a"), group("b", *members))
    await train(house, run, steps=1)

    (path,) = await asyncio.to_thread(lambda: list(archive_run(house.url, run, tmp_path)))

    table = pq.read_table(path)
    assert table["rewards"].to_pylist() == [[0.0, 0.0]] * 2 + [[0.0, 0.0, 1.0]] * 2
    assert table["logprobs"].to_pylist() == [None, None] + [[-0.5] * 3] * 2
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
    upkeep = Upkeep(archive=functools.partial(archive_step, house.url, folder=tmp_path))

    pulled = await train(house, run, steps=4, upkeep=upkeep)
    await released(house, run, 4)

    for step, batch in enumerate(pulled, start=1):
        table = pq.read_table(archive_path(tmp_path, run, step))
        assert table["trajectory_id"].to_pylist() == columns(batch, "trajectory_id")


async def test_a_folder_that_cannot_be_written_holds_the_release_back(house, tmp_path):
    run = house.create_run(batch_groups=1, retain_checkpoints=1)
    await house.publish(run, *(group(f"g{i}") for i in range(3)))
    asked, room = [], []

    def archive(name, step):
        asked.append(step)
        if step == 2 and not room:
            raise OSError("the disk is full")

    def trouble():
        return read_snapshot(house.client, run).release_trouble

    await train(house, run, steps=3, upkeep=Upkeep(archive=archive))
    await released(house, run, 1)

    await wait_until_async(lambda: asked.count(2) >= 3, describe="another try")
    assert house.frontier(run).released == 1
    assert house.client.exists(keys.trajectory_keys(run, "g1/0/0").turns)
    assert trouble() == "step 2 is not archived: the disk is full"

    room.append(1)
    await released(house, run, 3)
    await wait_until_async(lambda: not trouble(), describe="the end of the trouble")


async def test_failed_archive_is_reported_although_the_release_fails_too(house, monkeypatch):
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


async def test_defect_of_the_release_is_logged_and_ends_no_term(house, caplog):
    run = house.create_run(batch_groups=1, retain_checkpoints=1)
    await house.publish(run, group("g1"), group("g2"))
    defects = [RuntimeError("a defect")]

    def archive(name, step):
        if defects:
            raise defects.pop()

    await train(house, run, steps=2, upkeep=Upkeep(archive=archive))
    await released(house, run, 2)

    assert house.client.hget(keys.run_keys(run).leader, "epoch") == b"1"
    assert f"release in run {run} failed" in caplog.text


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
