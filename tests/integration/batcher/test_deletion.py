from __future__ import annotations

import asyncio
from typing import Any

import pytest

from turnstream.errors import FencedError, RunNotFoundError
from turnstream.generator import Publisher
from turnstream.store import keys
from turnstream.store.connection import connect
from turnstream.store.runs import create_run
from turnstream.testing import config, group, wait_until_async
from turnstream_server.bus.deletion import delete_run

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


async def delete(house: Any, run: str) -> None:
    def act() -> None:
        with connect(house.url) as client:
            delete_run(client, run)

    await asyncio.to_thread(act)


def keys_of(url: str, run: str) -> set[str]:
    """The last words of the keys of a run."""
    start = keys.run_keys(run).wake.removesuffix("}:wake")
    with connect(url) as client:
        found: Any = [
            *client.scan_iter(match=start + "}:*", count=1000),
            *client.scan_iter(match=start + "/*", count=1000),
        ]
    return {name.decode().rpartition(":")[2] for name in found}


async def test_who_waits_for_a_batch_of_a_deleted_run_is_told_at_once(house):
    run = house.create_run()
    trainer = house.trainer(await house.start_batcher(), run)
    await trainer.start()
    getting = asyncio.create_task(trainer.get(1, wait_s=20))

    async def leads() -> bool:
        with connect(house.url) as client:
            return bool(client.hget(keys.run_keys(run).leader, "owner"))

    await wait_until_async(leads)
    await delete(house, run)

    async with asyncio.timeout(15):
        with pytest.raises(RunNotFoundError):
            await getting


async def test_a_batcher_that_leads_and_one_that_follows_let_a_deleted_run_go(house):
    run, other = house.create_run(batch_groups=1), house.create_run(batch_groups=1)
    replicas = [await house.start_batcher(lease_s=0.6) for _ in range(2)]
    trainers = [house.trainer(replica, run) for replica in replicas]
    await trainers[0].start()
    await house.publish(run, *(group(f"g{i}") for i in range(3)))
    await trainers[0].committed(await trainers[0].stepped(await trainers[0].get(1)))

    await delete(house, run)
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
    assert keys_of(house.url, run) == {"deleted", "wake", "meta"}


async def test_a_run_of_the_same_name_begins_anew_in_the_same_batcher(house):
    run = house.create_run(batch_groups=1)
    replica = await house.start_batcher()
    trainer = house.trainer(replica, run)
    await trainer.start()
    await house.publish(run, group("g0"))
    first = await trainer.get(1)
    await delete(house, run)
    with pytest.raises(RunNotFoundError):
        await trainer.get(1)
    with connect(house.url) as client:
        for name in client.scan_iter(match=keys.run_keys(run).wake.removesuffix("}:wake") + "*"):
            client.delete(name)
        create_run(client, run, config(1))

    await house.publish(run, group("g1"))
    await trainer.start("s2")
    second = await trainer.get(1)

    assert first[0].mini_batch.rows.group_id[0] == "g0"
    assert second[0].mini_batch.rows.group_id[0] == "g1"


def test_a_generator_is_told_at_its_next_word_and_makes_no_key(house_at, own_server):
    house = house_at(own_server.url)
    run = house.create_run()
    with Publisher(house.url, run) as publisher:
        busy = publisher.trajectory("busy", sample=0, num_samples=1)
        busy.append([1, 2], [3], logprobs=[-0.5], version=0).result(10)

        with connect(house.url) as client:
            delete_run(client, run)
        with pytest.raises((FencedError, RunNotFoundError)):
            busy.append([1, 2, 3, 4], [5], logprobs=[-0.5], version=0).result(10)
        new = publisher.trajectory("new", sample=0, num_samples=1)
        with pytest.raises(RunNotFoundError):
            new.append([1], [2], logprobs=[-0.5], version=0).result(10)

    assert keys_of(house.url, run) == {"deleted", "wake", "meta"}
