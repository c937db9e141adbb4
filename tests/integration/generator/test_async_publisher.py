from __future__ import annotations

import asyncio

import pytest

from testkit import group, ids, trajectory, turn
from testkit.stores import Store
from testkit.waiting import wait_until_async
from turnstream.generator import AsyncPublisher, Publisher
from turnstream.types import TrajectoryKey

pytestmark = pytest.mark.redis

KEY = TrajectoryKey("g", 0)
ONE_GROUP = {"batch_groups": 1, "max_staleness": 0, "max_planned_ahead": 0}


async def test_both_publishers_store_the_same_bytes(store: Store) -> None:
    run, other = store.new_run(), store.new_run()
    turns = [turn("ab", "CdE", logprobs=-0.5, version=3), turn("abcdef", "G", rewards=1.0)]
    members = [trajectory(*turns, sample=sample) for sample in range(2)]

    with Publisher(store.url, run) as publisher:
        publisher.publish(group("g", *members))
    async with AsyncPublisher(store.url, other) as publisher:
        await publisher.publish(group("g", *members))

    for sample in range(2):
        key = TrajectoryKey("g", sample)
        assert store.read(run).records(key) == store.read(other).records(key)


async def test_a_cancelled_task_abandons_its_trajectory(store: Store) -> None:
    run = store.new_run()
    is_playing = asyncio.Event()

    async def play(publisher: AsyncPublisher) -> None:
        async with publisher.trajectory("g", 0, num_samples=1) as episode:
            await episode.append(ids("ab"), ids("c"))
            is_playing.set()
            await asyncio.Event().wait()

    async with AsyncPublisher(store.url, run) as publisher:
        task = asyncio.create_task(play(publisher))
        await is_playing.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert store.read(run).states() == {"g/0/0": "abandoned"}


async def test_seal_does_not_overtake_a_turn_that_waits_for_capacity(own_store: Store) -> None:
    run = own_store.new_run()

    async with AsyncPublisher(own_store.url, run, max_inflight_bytes=64) as publisher:
        episode = publisher.trajectory("g", 0, num_samples=1)
        await (await episode.append(ids("ab"), ids("c")))
        own_store.server.kill()
        await episode.append(ids("abc"), ids("d"))
        waiting = asyncio.create_task(episode.append(ids("abcd"), ids("e")))
        sealing = asyncio.create_task(episode.seal(1.0))
        await wait_until_async(
            lambda: publisher.statistics().num_retries > 1, describe="failing writes"
        )
        was_waiting = not waiting.done()
        await asyncio.to_thread(own_store.server.restart)
        await asyncio.gather(waiting, sealing)

    assert was_waiting
    assert len(own_store.read(run).spelled(KEY)) == 3
    assert own_store.read(run).states() == {"g/0/0": "sealed"}


async def test_a_publisher_whose_closing_is_cancelled_has_disconnected(own_store: Store) -> None:
    run = own_store.new_run()
    publisher = AsyncPublisher(own_store.url, run)
    await publisher.lapsed()
    await publisher.publish(group("g"))
    await publisher.flush()

    closing = asyncio.create_task(publisher.close())
    while not closing.done():
        await asyncio.sleep(0)
        closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing

    await wait_until_async(
        lambda: len(own_store.client.client_list()) == 1, describe="the end of all others"
    )
