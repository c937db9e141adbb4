from __future__ import annotations

import asyncio
from typing import Any

import pytest

from testkit import config, group, wait_until_async
from turnstream.errors import RunNotFoundError
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import create_run
from turnstream_server.bus.admin.deletion import delete_run

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


def keys_of(url: str, run: str) -> set[str]:
    """The last words of the keys of a run."""
    start = keys.run_keys(run).wake.removesuffix("}:wake")
    with connect(url) as client:
        found: Any = [
            *client.scan_iter(match=start + "}:*", count=1000),
            *client.scan_iter(match=start + "/*", count=1000),
        ]
    return {name.decode().rpartition(":")[2] for name in found}


async def test_waiting_calls_of_a_deleted_run_end_at_once(house):
    run, trainer = await house.serve()
    await trainer.start()
    getting = asyncio.create_task(trainer.get(1, wait_s=20))

    await wait_until_async(lambda: bool(house.client.hget(keys.run_keys(run).leader, "owner")))
    await asyncio.to_thread(delete_run, house.client, run)

    async with asyncio.timeout(15):
        with pytest.raises(RunNotFoundError):
            await getting


async def test_leader_and_follower_drop_a_deleted_run(house):
    run, other = house.create_run(batch_groups=1), house.create_run(batch_groups=1)
    replicas = [await house.start_batcher(lease_s=0.6) for _ in range(2)]
    trainers = [house.trainer(replica, run) for replica in replicas]
    await trainers[0].start()
    await house.publish(run, *(group(f"g{i}") for i in range(3)))
    await trainers[0].committed(await trainers[0].stepped(await trainers[0].get(1)))

    await asyncio.to_thread(delete_run, house.client, run)
    for trainer in trainers:
        trainer.session_epoch = 1
        with pytest.raises(RunNotFoundError):
            await trainer.get(2)
    with pytest.raises(RunNotFoundError):
        await trainers[1].start("again")

    going_on = house.trainer(replicas[1], other)
    await house.publish(other, group("g0"))
    await going_on.start()
    assert [pulled.rows for pulled in await going_on.get(1)]
    assert keys_of(house.url, run) == {"deleted", "wake", "meta", "incarnation"}


async def test_leader_of_a_deleted_run_plans_nothing_in_the_next_run(house):
    run, stalls, may_go_on = house.create_run(batch_groups=1), asyncio.Event(), asyncio.Event()

    async def stall(manifest: Any) -> None:
        if manifest.run == run:
            stalls.set()
            await may_go_on.wait()

    replica = await house.start_batcher(before_write=stall)
    await house.publish(run, group("old"))
    await stalls.wait()
    await asyncio.to_thread(delete_run, house.client, run)
    create_run(house.client, run, config(1))
    may_go_on.set()
    await house.publish(run, group("new"))

    trainer = house.trainer(replica, run)
    trainer.run = (await trainer.start()).run
    (pulled,) = await trainer.get(1)

    assert trainer.run == f"{run}~2"
    assert set(pulled.mini_batch.rows.group_id) == {"new"}
    assert pulled.mini_batch.info.run == f"{run}~2"
    assert not house.client.exists(keys.run_keys(run).plan, keys.run_keys(run).frontier)
