"""Runs that are deleted, and runs that are forks of others."""

import asyncio
from typing import Any

import pytest

from testkit import config, group, wait_until_async
from turnstream.errors import RunNotFoundError
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import create_run
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.ledger.admin.deletion import delete_run
from turnstream_server.ledger.admin.forks import fork_run
from turnstream_server.ledger.planning.manifests import read_plan
from turnstream_server.ledger.queries.ledger import read_ledger


def keys_of(url: str, run: str) -> set[str]:
    """The last words of the keys of a run."""
    start = keys.run_keys(run).wake.removesuffix("}:wake")
    with connect(url) as client:
        found: Any = [
            *client.scan_iter(match=start + "}:*", count=1000),
            *client.scan_iter(match=start + "/*", count=1000),
        ]
    return {name.decode().rpartition(":")[2] for name in found}


async def test_waiting_calls_of_a_deleted_run_end_at_once(cluster):
    run, trainer = await cluster.serve()
    await trainer.start()
    getting = asyncio.create_task(trainer.get(1, wait_s=20))

    await wait_until_async(lambda: bool(cluster.client.hget(keys.run_keys(run).leader, "owner")))
    await asyncio.to_thread(delete_run, cluster.client, run)

    async with asyncio.timeout(15):
        with pytest.raises(RunNotFoundError):
            await getting


async def test_leader_and_follower_drop_a_deleted_run(cluster):
    run, other = cluster.create_run(batch_groups=1), cluster.create_run(batch_groups=1)
    replicas = [await cluster.start_batcher(lease_s=0.6) for _ in range(2)]
    trainers = [cluster.trainer(replica, run) for replica in replicas]
    await trainers[0].start()
    await cluster.publish(run, *(group(f"g{i}") for i in range(3)))
    await trainers[0].committed(await trainers[0].stepped(await trainers[0].get(1)))

    await asyncio.to_thread(delete_run, cluster.client, run)
    for trainer in trainers:
        trainer.session_epoch = 1
        with pytest.raises(RunNotFoundError):
            await trainer.get(2)
    with pytest.raises(RunNotFoundError):
        await trainers[1].start("again")

    going_on = cluster.trainer(replicas[1], other)
    await cluster.publish(other, group("g0"))
    await going_on.start()
    assert [pulled.rows for pulled in await going_on.get(1)]
    assert keys_of(cluster.url, run) == {"deleted", "wake", "meta", "incarnation"}


async def test_leader_of_a_deleted_run_plans_nothing_in_the_next_run(cluster):
    run, stalls, may_go_on = cluster.create_run(batch_groups=1), asyncio.Event(), asyncio.Event()

    async def stall(manifest: Any) -> None:
        if manifest.run == run:
            stalls.set()
            await may_go_on.wait()

    replica = await cluster.start_batcher(before_write=stall)
    await cluster.publish(run, group("old"))
    await stalls.wait()
    await asyncio.to_thread(delete_run, cluster.client, run)
    create_run(cluster.client, run, config(1))
    may_go_on.set()
    await cluster.publish(run, group("new"))

    trainer = cluster.trainer(replica, run)
    trainer.run = (await trainer.start()).run
    (pulled,) = await trainer.get(1)

    assert trainer.run == f"{run}~2"
    assert set(pulled.mini_batch.rows.group_id) == {"new"}
    assert pulled.mini_batch.info.run == f"{run}~2"
    assert not cluster.client.exists(keys.run_keys(run).plan, keys.run_keys(run).frontier)


SMALL = Upkeep(snapshot_events=1, snapshot_steps=1, compact_ended=2)


@pytest.mark.parametrize(("num_steps", "retained"), [(4, 2), (3, 1)])
async def test_the_oldest_checkpoint_can_be_forked_when_its_plan_is_gone(
    cluster, num_steps: int, retained: int
):
    run = cluster.create_run(batch_groups=1, retain_checkpoints=retained)
    new_run = f"{run} fork"
    replica = await cluster.start_batcher(upkeep=SMALL)
    trainer = cluster.trainer(replica, run)
    await trainer.start()
    await cluster.publish(run, *(group(f"g{i}") for i in range(num_steps)))
    *_, token = await trainer.train(1, 2, 3)
    await trainer.train(*range(4, num_steps + 1))
    frontier = keys.run_keys(run).frontier
    await wait_until_async(
        lambda: cluster.client.hget(frontier, "folded") == b"3", describe="3 folded steps"
    )
    plans = [read_plan(cluster.client, run, step) is not None for step in (3, 4)]

    fork_run(cluster.client, run, new_run, token)
    forked = cluster.trainer(replica, new_run)
    reply = await forked.start(token=str(token))
    await cluster.publish(new_run, group("g0"), group("g1"))
    pulled = [*await forked.get(4), *await forked.get(5)]

    rows = [int(row) for each in pulled for row in each.mini_batch.rows.row_id]
    assert plans == [False, num_steps == 4]
    assert (reply.next_step, reply.newest_version) == (4, -1)
    assert rows == list(range(rows[0], rows[0] + len(rows)))
    assert rows[0] == 6  # three batches of two rows
    assert {group_id for each in pulled for group_id in each.mini_batch.rows.group_id} == {
        *("g0", "g1"),
    }
    ledger = read_ledger(cluster.client, new_run)
    ledger.check()
    assert ledger.accepted == 10
