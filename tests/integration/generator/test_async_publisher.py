from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import redis

from testkit import group, ids, trajectory, turn, wait_until_async
from turnstream.errors import (
    InvalidTurnError,
    RejectedError,
)
from turnstream.generator import AsyncPublisher, Publisher
from turnstream.generator.api.async_publisher import AsyncTrajectoryWriter
from turnstream.types import (
    GroupOpened,
    RunClosed,
    SealedTrajectory,
    TrajectoryAbandoned,
    TrajectoryKey,
)
from turnstream_server.embedded import EmbeddedServer

pytestmark = pytest.mark.redis

NewRun = Callable[..., str]
Read = Callable[[redis.Redis, str], Any]
LoseAnswer = Callable[[Any, str], None]
KEY = TrajectoryKey("g", 0)
ONE_GROUP = {"batch_groups": 1, "max_staleness": 0, "max_planned_ahead": 0}


async def until(predicate: Callable[[], bool], describe: str) -> None:
    async def ask() -> bool:
        return predicate()

    await wait_until_async(ask, describe=describe)


async def test_five_lines_bring_a_trajectory_into_the_run(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)

    async with AsyncPublisher(server.url, run) as publisher:
        async with publisher.trajectory("g", 0, num_samples=1, prompt_uid="p") as episode:
            await episode.append([1, 2, 3], [4, 5], logprobs=[-0.5, -0.25], policy_version=7)
            await episode.append([1, 2, 3, 4, 5, 6], [7], logprobs=[-1.0], policy_version=8)
            await episode.seal(reward=0.5)
        states = read(client, run).states()

    opened, seal = read(client, run).events()
    assert states == {"g/0/0": "sealed"}
    assert opened == GroupOpened(group_id="g", prompt_uid="p", num_samples=1)
    assert [(s.parent_turn, s.shared_tokens) for s in seal.turns] == [(-1, 0), (0, 5)]
    assert (seal.reward, seal.oldest_version, seal.newest_version) == (0.5, 7, 8)


async def test_both_publishers_store_the_same_bytes(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run, other = new_run(client), new_run(client)
    turns = [turn("ab", "CdE", logprobs=-0.5, version=3), turn("abcdef", "G", rewards=1.0)]
    members = [trajectory(*turns, sample=sample) for sample in range(2)]

    with Publisher(server.url, run) as publisher:
        publisher.publish(group("g", *members))
    async with AsyncPublisher(server.url, other) as publisher:
        await publisher.publish(group("g", *members))

    for sample in range(2):
        key = TrajectoryKey("g", sample)
        assert read(client, run).records(key) == read(client, other).records(key)


async def test_many_tasks_share_a_publisher(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)

    async def play(visit: Any, sample: int) -> None:
        async with visit.trajectory(sample) as episode:
            for number in range(1, 11):
                await episode.append(ids("a" * number), ids("b"))
            await episode.seal(float(sample))

    async with AsyncPublisher(server.url, run) as publisher, publisher.group("g", 16) as visit:
        await asyncio.gather(*[play(visit, sample) for sample in range(16)])

    stored = read(client, run)
    assert stored.counts() == {"accepted": 16, "sealed": 16}
    for key in stored.sealed():
        assert stored.spelled(key) == [("a" * number, "b") for number in range(1, 11)]


async def test_parallel_agents_share_one_numbering(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)
    prompts = [chr(97 + agent) * 20 for agent in range(8)]

    async with AsyncPublisher(server.url, run) as publisher:
        episode = publisher.trajectory("g", 0, num_samples=1)
        await asyncio.gather(*[episode.append(ids(prompt), ids("z")) for prompt in prompts])
        await episode.seal(1.0)

    assert sorted(read(client, run).spelled(KEY)) == [(prompt, "z") for prompt in prompts]


async def test_an_exception_abandons_the_trajectory_and_the_rest_of_the_group(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)

    async def play(publisher: AsyncPublisher) -> None:
        async with publisher.group("g", 2) as visit, visit.trajectory(0) as episode:
            await episode.append(ids("ab"), ids("c"))
            raise RuntimeError("the tool broke")

    async with AsyncPublisher(server.url, run) as publisher:
        with pytest.raises(RuntimeError):
            await play(publisher)

    reason = "RuntimeError: the tool broke"
    assert set(read(client, run).ledger().values()) == {f"abandoned:{reason}"}
    _, *ends = read(client, run).events()
    assert sorted(ends, key=lambda end: end.key) == [
        TrajectoryAbandoned(key=TrajectoryKey("g", sample), reason=reason) for sample in range(2)
    ]


async def test_a_cancelled_task_abandons_its_trajectory(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)
    is_playing = asyncio.Event()

    async def play(publisher: AsyncPublisher) -> None:
        async with publisher.trajectory("g", 0, num_samples=1) as episode:
            await episode.append(ids("ab"), ids("c"))
            is_playing.set()
            await asyncio.Event().wait()

    async with AsyncPublisher(server.url, run) as publisher:
        task = asyncio.create_task(play(publisher))
        await is_playing.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert read(client, run).states() == {"g/0/0": "abandoned"}


async def test_ended_and_unsealed_trajectories_are_treated_as_by_the_other_publisher(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)

    async with AsyncPublisher(server.url, run) as publisher, publisher.group("g", 3) as visit:
        async with visit.trajectory(0) as episode:
            with pytest.raises(InvalidTurnError, match="turns: there is none"):
                await episode.seal(1.0)
            await episode.append(ids("ab"), ids("c"))
        with pytest.raises(RejectedError, match="sealed or abandoned"):
            await episode.append(ids("ab"), ids("c"))
        await visit.trajectory(1).abandon("too hard")

    assert read(client, run).ledger() == {
        "g/0/0": "abandoned:left without a seal",
        "g/1/0": "abandoned:too hard",
        "g/2/0": "abandoned:never started",
    }


async def test_a_group_waits_for_capacity_and_starts_when_it_is_freed(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client, **ONE_GROUP)

    async with AsyncPublisher(server.url, run) as publisher:
        await (await publisher.publish(group("a")))
        for step in (1, 2):
            receipt = await publisher.publish(group(f"b{step}"))
            await until(lambda n=step: publisher.statistics().num_waits == n, "a refused group")
            was_done = receipt.is_done
            read(client, run).frees_capacity(stepped=step)
            await receipt.result(10)
            assert not was_done

    assert read(client, run).counts() == {"accepted": 6, "sealed": 6}


async def test_server_killed_in_mid_stream_ends_with_every_turn_once(
    own_server: EmbeddedServer, own_client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(own_client)

    async def play(episode: AsyncTrajectoryWriter, numbers: range) -> None:
        for number in numbers:
            await episode.append(ids("a" * number), ids("b"))

    async with AsyncPublisher(own_server.url, run) as publisher:
        episodes = [publisher.trajectory("g", sample, num_samples=4) for sample in range(4)]
        await asyncio.gather(*[play(episode, range(1, 31)) for episode in episodes])
        own_server.kill()
        await asyncio.gather(*[play(episode, range(31, 61)) for episode in episodes])
        await until(lambda: publisher.statistics().num_retries > 4, "failing writes")
        await asyncio.to_thread(own_server.restart)
        await asyncio.gather(*[episode.seal(1.0) for episode in episodes])

    stored = read(own_client, run)
    assert stored.counts() == {"accepted": 4, "sealed": 4}
    for key in stored.sealed():
        assert stored.spelled(key) == [("a" * number, "b") for number in range(1, 61)]


async def test_a_seal_does_not_overtake_a_turn_that_waits_for_room(
    own_server: EmbeddedServer, own_client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(own_client)

    async with AsyncPublisher(own_server.url, run, max_inflight_bytes=64) as publisher:
        episode = publisher.trajectory("g", 0, num_samples=1)
        await (await episode.append(ids("ab"), ids("c")))
        own_server.kill()
        await episode.append(ids("abc"), ids("d"))
        waiting = asyncio.create_task(episode.append(ids("abcd"), ids("e")))
        sealing = asyncio.create_task(episode.seal(1.0))
        await until(lambda: publisher.statistics().num_retries > 1, "failing writes")
        was_waiting = not waiting.done()
        await asyncio.to_thread(own_server.restart)
        await asyncio.gather(waiting, sealing)

    assert was_waiting
    assert len(read(own_client, run).spelled(KEY)) == 3
    assert read(own_client, run).states() == {"g/0/0": "sealed"}


async def test_closing_the_run_comes_after_everything_accepted(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client)

    async with AsyncPublisher(server.url, run) as publisher:
        await publisher.publish(group("g"))
        await publisher.close_run("done")

    kinds = [type(event) for event in read(client, run).events()]
    assert kinds == [GroupOpened, SealedTrajectory, SealedTrajectory, RunClosed]


async def test_a_publisher_whose_closing_is_cancelled_has_disconnected(
    own_server: EmbeddedServer, own_client: redis.Redis, new_run: NewRun
) -> None:
    run = new_run(own_client)
    publisher = AsyncPublisher(own_server.url, run)
    await publisher.lapsed()
    await publisher.publish(group("g"))
    await publisher.flush()

    closing = asyncio.create_task(publisher.close())
    while not closing.done():
        await asyncio.sleep(0)
        closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing

    await until(lambda: len(own_client.client_list()) == 1, "the end of all others")
