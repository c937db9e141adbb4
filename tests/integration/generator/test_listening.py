"""Groups that wait for admission: one listener wakes them whenever capacity is freed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio

from testkit import group, wait_until, wait_until_async
from turnstream.generator import AsyncPublisher, Publisher
from turnstream.generator.transport import async_sender, sender
from turnstream_server.embedded import EmbeddedServer

pytestmark = pytest.mark.redis

NewRun = Callable[..., str]
Read = Callable[[redis.Redis, str], Any]
ONE_GROUP = {"batch_groups": 1, "max_staleness": 0, "max_planned_ahead": 0}
STEPS = range(1, 6)


@pytest.fixture(autouse=True)
def no_second_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that waits asks again because the wake stream moves, and for no other reason."""
    for module in (sender, async_sender):
        monkeypatch.setattr(module, "ASK_AGAIN_S", 25.0)


async def until(predicate: Callable[[], bool], describe: str) -> None:
    async def ask() -> bool:
        return predicate()

    await wait_until_async(ask, describe=describe)


def blocked(client: redis.Redis) -> list[str]:
    """Ids of the connections that wait in a blocking read."""
    entries: Any = client.client_list()
    return [entry["id"] for entry in entries if "b" in entry["flags"]]


def num_reads(client: redis.Redis) -> int:
    """Number of reads of streams so far."""
    stats: Any = client.info("commandstats")
    return stats.get("cmdstat_xread", {"calls": 0})["calls"]


async def test_refusal_while_the_listener_closes_is_noticed(
    server: EmbeddedServer,
    client: redis.Redis,
    new_run: NewRun,
    read: Read,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The listener closed its connection after each wait, and a refusal that arrived meanwhile
    # started no new one. The group was admitted 18.6 s after capacity was free.
    run = new_run(client, **ONE_GROUP)
    may_close = asyncio.Event()
    close = redis.asyncio.Redis.aclose

    async def close_late(client: Any) -> None:
        await may_close.wait()
        await close(client)

    monkeypatch.setattr(redis.asyncio.Redis, "aclose", close_late)
    async with AsyncPublisher(server.url, run, keep_s=0) as publisher:
        await (await publisher.publish(group("a")))
        first = await publisher.publish(group("b"))
        await until(lambda: len(blocked(client)) == 1, "the listener")
        read(client, run).frees_capacity(stepped=1)
        await first.result(10)
        second = await publisher.publish(group("c"))
        await until(lambda: publisher.statistics().num_waits == 2, "the second refusal")
        may_close.set()
        read(client, run).frees_capacity(stepped=2)
        await second.result(10)

    assert read(client, run).counts() == {"accepted": 6, "sealed": 6}


async def test_async_publisher_listens_with_one_connection_and_never_polls(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    # Each wait had a connection and a task of its own, and a refusal could fall between two of
    # them. One connection waits for all of them, and an idle publisher asks nothing.
    run = new_run(client, **ONE_GROUP)
    before = num_reads(client)
    listeners: set[str] = set()

    async with AsyncPublisher(server.url, run) as publisher:
        await (await publisher.publish(group("g0")))
        for step in STEPS:
            receipt = await publisher.publish(group(f"g{step}"))
            await until(lambda: len(blocked(client)) == 1, "the listener")
            listeners.update(blocked(client))
            read(client, run).frees_capacity(stepped=step)
            await receipt.result(10)
        when_idle = blocked(client)

    assert len(listeners) == 1
    assert when_idle == []
    assert num_reads(client) - before == len(STEPS)


def test_publisher_listens_with_one_connection_and_never_polls(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    # The twin for threads keeps one listener for its whole life: no refusal falls between two.
    # The same counts hold for both.
    run = new_run(client, **ONE_GROUP)
    before = num_reads(client)
    listeners: set[str] = set()

    with Publisher(server.url, run) as publisher:
        publisher.publish(group("g0")).result(10)
        for step in STEPS:
            receipt = publisher.publish(group(f"g{step}"))
            wait_until(lambda: len(blocked(client)) == 1, describe="the listener")
            listeners.update(blocked(client))
            read(client, run).frees_capacity(stepped=step)
            receipt.result(10)
        when_idle = blocked(client)

    assert len(listeners) == 1
    assert when_idle == []
    assert num_reads(client) - before == len(STEPS)
