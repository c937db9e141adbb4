"""Seals whose answer, or whose trajectory, a store lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from harness.proxy import Proxy
from testkit import group, ids, wait_until_async
from testkit.scripts import script
from turnstream.errors import StoreBehindError
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.types import TrajectoryState
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.bus.queries.ledger import read_ledger
from turnstream_server.embedded import EmbeddedServer

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

PastOf = Callable[[EmbeddedServer], Any]
SMALL = Upkeep(snapshot_events=1, snapshot_steps=1, fold_ended=2)


def _give_up(url: str, run: str) -> None:
    """Another generator opens the group g, and abandons all of it."""
    with Publisher(url, run, writer="second") as publisher:
        for sample in (0, 1):
            writer = publisher.trajectory("g", sample, num_samples=2)
            writer.append(ids("ab"), ids("d")).result(10)
            writer.abandon("no more time").result(10)


async def _folded(url: str, run: str) -> None:
    """Nothing is left of the ledger: ended trajectories have no payload and are compact."""

    def is_folded() -> bool:
        with connect(url) as client:
            names = keys.run_keys(run)
            return client.hlen(names.ended) > 0 and client.hlen(names.ledger) == 0

    await wait_until_async(lambda: asyncio.to_thread(is_folded), describe="the release")


async def test_writer_of_a_lost_seal_learns_that_its_trajectory_was_abandoned(
    house: Any, server: EmbeddedServer, past_of: PastOf
) -> None:
    run = house.create_run(batch_groups=1)
    past = await asyncio.to_thread(past_of, server)

    with Publisher(house.url, run, writer="first", keep_s=60.0) as publisher:
        await asyncio.to_thread(publisher.publish(group("g")).result, 10)
        await asyncio.to_thread(past.come_back)
        await asyncio.to_thread(_give_up, house.url, run)
        await house.start_batcher(upkeep=SMALL)
        await _folded(house.url, run)
        await asyncio.to_thread(publisher.publish(group("h")).result, 10)

        with pytest.raises(StoreBehindError, match=r"g/[01]/0 was acknowledged, and .* lost"):
            await asyncio.to_thread(publisher.flush)


async def test_tombstone_says_whether_the_trajectory_was_abandoned(house: Any) -> None:
    run = house.create_run(batch_groups=1, drop_zero_variance=True)
    await house.start_batcher(upkeep=SMALL)

    await asyncio.to_thread(_seal_two_of_four, house.url, run)
    await _folded(house.url, run)

    assert await asyncio.to_thread(_tombstones, house.url, run) == [
        *(b"over", b"over", b"given up", b"given up")
    ]


def _seal_two_of_four(url: str, run: str) -> None:
    """Two are sealed with one reward, so the group is filtered, and two are abandoned."""
    with Publisher(url, run) as publisher:
        writers = [publisher.trajectory("g", sample, num_samples=4) for sample in range(4)]
        for writer in writers:
            writer.append(ids("ab"), ids("c")).result(10)
        for writer in writers[:2]:
            writer.seal(1.0)
        for writer in writers[2:]:
            writer.abandon("no more time").result(10)


def _tombstones(url: str, run: str) -> list[bytes | None]:
    places = [keys.trajectory_keys(run, f"g/{sample}/0").meta for sample in range(4)]
    with connect(url) as client:
        said: Any = [client.hget(place, "released") for place in places]
    return said


async def test_seal_with_a_lost_answer_counts_after_the_run_released_it(
    house: Any,
) -> None:
    run = house.create_run(batch_groups=1, retain_checkpoints=1)
    small = Upkeep(snapshot_events=1, snapshot_steps=1, fold_ended=2)
    trainer = await house.start_trainer(run, upkeep=small)

    with Proxy(house.url) as proxy:
        proxy.unanswered = script("post_sealed").sha.encode()
        sealing = asyncio.create_task(asyncio.to_thread(_seal, proxy.url, run))
        pulled = await trainer.get(1, wait_s=60)
        await trainer.committed(await trainer.stepped(pulled))
        await _released(house.url, run)
        proxy.unanswered, proxy.replies.is_silent = b"", False
        proxy.cut_all()
        statistics = await sealing

    assert (statistics.num_trajectories, statistics.num_lost) == (1, 0)
    assert read_ledger(house.client, run).by_state[TrajectoryState.COMMITTED] == 1


def _seal(url: str, run: str) -> Any:
    with Publisher(url, run, timeout_s=60) as publisher:
        writer = publisher.trajectory("g", 0, num_samples=1)
        writer.append(ids("ab"), ids("c"))
        writer.seal(1.0)
        publisher.flush()
        return publisher.statistics()


async def _released(url: str, run: str) -> None:
    def is_folded() -> bool:
        with connect(url) as client:
            return not client.hexists(keys.run_keys(run).ledger, "g/0/0")

    await wait_until_async(lambda: asyncio.to_thread(is_folded), describe="the release")
