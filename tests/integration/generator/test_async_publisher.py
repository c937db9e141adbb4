from __future__ import annotations

import asyncio

import pytest

from testkit import group, ids, trajectory, turn
from testkit.stores import Store
from testkit.waiting import poll_until
from turnstream.errors import (
    InvalidTurnError,
    RejectedError,
)
from turnstream.generator import AsyncPublisher, Publisher
from turnstream.generator.api.trajectory_writers import AsyncTrajectoryWriter
from turnstream.types import (
    GroupOpened,
    RunClosed,
    SealedTrajectory,
    TrajectoryAbandoned,
    TrajectoryKey,
)

pytestmark = pytest.mark.redis

KEY = TrajectoryKey("g", 0)
ONE_GROUP = {"batch_groups": 1, "max_staleness": 0, "max_planned_ahead": 0}


async def test_trajectory_is_stored_with_its_turns_and_seal(store: Store) -> None:
    run = store.new_run()

    async with AsyncPublisher(store.url, run) as publisher:
        async with publisher.trajectory("g", 0, num_samples=1, prompt_uid="p") as episode:
            await episode.append([1, 2, 3], [4, 5], logprobs=[-0.5, -0.25], policy_version=7)
            await episode.append([1, 2, 3, 4, 5, 6], [7], logprobs=[-1.0], policy_version=8)
            await episode.seal(reward=0.5)
        states = store.read(run).states()

    opened, seal = store.read(run).events()
    assert states == {"g/0/0": "sealed"}
    assert opened == GroupOpened(group_id="g", prompt_uid="p", num_samples=1)
    assert [(s.parent_turn, s.shared_tokens) for s in seal.turns] == [(-1, 0), (0, 5)]
    assert (seal.reward, seal.oldest_version, seal.newest_version) == (0.5, 7, 8)


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


async def test_parallel_agents_share_one_numbering(store: Store) -> None:
    run = store.new_run()
    prompts = [chr(97 + agent) * 20 for agent in range(8)]

    async with AsyncPublisher(store.url, run) as publisher:
        episode = publisher.trajectory("g", 0, num_samples=1)
        await asyncio.gather(*[episode.append(ids(prompt), ids("z")) for prompt in prompts])
        await episode.seal(1.0)

    assert sorted(store.read(run).spelled(KEY)) == [(prompt, "z") for prompt in prompts]


async def test_an_exception_abandons_the_trajectory_and_the_rest_of_the_group(store: Store) -> None:
    run = store.new_run()

    async def play(publisher: AsyncPublisher) -> None:
        async with publisher.group("g", 2) as visit, visit.trajectory(0) as episode:
            await episode.append(ids("ab"), ids("c"))
            raise RuntimeError("the tool broke")

    async with AsyncPublisher(store.url, run) as publisher:
        with pytest.raises(RuntimeError):
            await play(publisher)

    reason = "RuntimeError: the tool broke"
    assert set(store.read(run).ledger().values()) == {f"abandoned:{reason}"}
    _, *ends = store.read(run).events()
    assert sorted(ends, key=lambda end: end.key) == [
        TrajectoryAbandoned(key=TrajectoryKey("g", sample), reason=reason) for sample in range(2)
    ]


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


async def test_async_publisher_abandons_unsealed_and_refuses_ended_trajectories(
    store: Store,
) -> None:
    run = store.new_run()

    async with AsyncPublisher(store.url, run) as publisher, publisher.group("g", 3) as visit:
        async with visit.trajectory(0) as episode:
            with pytest.raises(InvalidTurnError, match="turns: there is none"):
                await episode.seal(1.0)
            await episode.append(ids("ab"), ids("c"))
        with pytest.raises(RejectedError, match="sealed or abandoned"):
            await episode.append(ids("ab"), ids("c"))
        await visit.trajectory(1).abandon("too hard")

    assert store.read(run).ledger() == {
        "g/0/0": "abandoned:left without a seal",
        "g/1/0": "abandoned:too hard",
        "g/2/0": "abandoned:never started",
    }


async def test_server_killed_in_mid_stream_ends_with_every_turn_once(own_store: Store) -> None:
    run = own_store.new_run()

    async def play(episode: AsyncTrajectoryWriter, numbers: range) -> None:
        for number in numbers:
            await episode.append(ids("a" * number), ids("b"))

    async with AsyncPublisher(own_store.url, run) as publisher:
        episodes = [publisher.trajectory("g", sample, num_samples=4) for sample in range(4)]
        await asyncio.gather(*[play(episode, range(1, 31)) for episode in episodes])
        own_store.server.kill()
        await asyncio.gather(*[play(episode, range(31, 61)) for episode in episodes])
        await poll_until(lambda: publisher.statistics().num_retries > 4, "failing writes")
        await asyncio.to_thread(own_store.server.restart)
        await asyncio.gather(*[episode.seal(1.0) for episode in episodes])

    stored = own_store.read(run)
    assert stored.counts() == {"accepted": 4, "sealed": 4}
    for key in stored.sealed():
        assert stored.spelled(key) == [("a" * number, "b") for number in range(1, 61)]


async def test_seal_does_not_overtake_a_turn_that_waits_for_capacity(own_store: Store) -> None:
    run = own_store.new_run()

    async with AsyncPublisher(own_store.url, run, max_inflight_bytes=64) as publisher:
        episode = publisher.trajectory("g", 0, num_samples=1)
        await (await episode.append(ids("ab"), ids("c")))
        own_store.server.kill()
        await episode.append(ids("abc"), ids("d"))
        waiting = asyncio.create_task(episode.append(ids("abcd"), ids("e")))
        sealing = asyncio.create_task(episode.seal(1.0))
        await poll_until(lambda: publisher.statistics().num_retries > 1, "failing writes")
        was_waiting = not waiting.done()
        await asyncio.to_thread(own_store.server.restart)
        await asyncio.gather(waiting, sealing)

    assert was_waiting
    assert len(own_store.read(run).spelled(KEY)) == 3
    assert own_store.read(run).states() == {"g/0/0": "sealed"}


async def test_closing_the_run_comes_after_everything_accepted(store: Store) -> None:
    run = store.new_run()

    async with AsyncPublisher(store.url, run) as publisher:
        await publisher.publish(group("g"))
        await publisher.close_run("done")

    kinds = [type(event) for event in store.read(run).events()]
    assert kinds == [GroupOpened, SealedTrajectory, SealedTrajectory, RunClosed]


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

    await poll_until(lambda: len(own_store.client.client_list()) == 1, "the end of all others")
