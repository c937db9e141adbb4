from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis
import redis.asyncio

from testkit import group, wait_until
from testkit.services.stores import Store
from testkit.waiting import wait_until_async
from turnstream.errors import EndOfRunError
from turnstream.generator import AsyncPublisher, Publisher
from turnstream.generator.transport import sender
from turnstream.store.run.runs import close_run

pytestmark = pytest.mark.redis

ONE_GROUP = {"batch_groups": 1, "max_staleness": 0, "max_planned_ahead": 0}


def is_waiting(publisher: Publisher, num_groups: int = 1) -> None:
    wait_until(lambda: publisher.statistics().num_waits == num_groups, describe="a refused group")


def test_groups_are_admitted_in_the_order_of_their_requests(store: Store) -> None:
    run = store.new_run(**ONE_GROUP)

    with Publisher(store.url, run) as publisher:
        publisher.publish(group("g0")).result(10)
        receipts = [publisher.publish(group(f"g{number}")) for number in range(1, 5)]
        is_waiting(publisher, num_groups=4)
        for step, receipt in enumerate(receipts, start=1):
            store.read(run).frees_capacity(stepped=step)
            receipt.result(10)

    opened = [event.group_id for event in store.read(run).events() if hasattr(event, "group_id")]
    assert opened == [f"g{number}" for number in range(5)]


def test_closing_the_run_refuses_waiting_groups(store: Store) -> None:
    run = store.new_run(**ONE_GROUP)

    with Publisher(store.url, run) as publisher:
        publisher.publish(group("a")).result(10)
        receipt = publisher.publish(group("b"))
        is_waiting(publisher)
        close_run(store.client, run)
        with pytest.raises(EndOfRunError):
            receipt.result(10)

    assert store.read(run).counts() == {"accepted": 2, "sealed": 2}


def test_a_group_that_waits_starts_after_the_server_was_restarted(own_store: Store) -> None:
    run = own_store.new_run(**ONE_GROUP)

    with Publisher(own_store.url, run) as publisher:
        publisher.publish(group("a")).result(10)
        receipt = publisher.publish(group("b"))
        is_waiting(publisher)
        own_store.restart()
        own_store.read(run).frees_capacity(stepped=1)
        receipt.result(10)

    assert own_store.read(run).counts() == {"accepted": 4, "sealed": 4}


STEPS = range(1, 6)


@pytest.fixture
def no_second_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that waits asks again because the wake stream moves, and for no other reason."""
    monkeypatch.setattr(sender, "ASK_AGAIN_S", 25.0)


def blocked(client: redis.Redis) -> list[str]:
    """Ids of the connections that wait in a blocking read."""
    entries: Any = client.client_list()
    return [entry["id"] for entry in entries if "b" in entry["flags"]]


def num_reads(client: redis.Redis) -> int:
    """Number of reads of streams so far."""
    stats: Any = client.info("commandstats")
    return stats.get("cmdstat_xread", {"calls": 0})["calls"]


@pytest.mark.usefixtures("no_second_question")
async def test_refusal_while_the_listener_closes_is_noticed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The listener closed its connection after each wait, and a refusal during the close
    # started no new one. The group was admitted 18.6 s after capacity was free.
    run = store.new_run(**ONE_GROUP)
    may_close = asyncio.Event()
    close = redis.asyncio.Redis.aclose

    async def close_late(connection: Any) -> None:
        await may_close.wait()
        await close(connection)

    monkeypatch.setattr(redis.asyncio.Redis, "aclose", close_late)
    async with AsyncPublisher(store.url, run, keep_s=0) as publisher:
        await (await publisher.publish(group("a")))
        first = await publisher.publish(group("b"))
        await wait_until_async(lambda: len(blocked(store.client)) == 1, describe="the listener")
        store.read(run).frees_capacity(stepped=1)
        await first.result(10)
        second = await publisher.publish(group("c"))
        await wait_until_async(
            lambda: publisher.statistics().num_waits == 2, describe="the second refusal"
        )
        may_close.set()
        store.read(run).frees_capacity(stepped=2)
        await second.result(10)

    assert store.read(run).counts() == {"accepted": 6, "sealed": 6}


@pytest.mark.usefixtures("no_second_question")
def test_publisher_listens_with_one_connection_and_never_polls(store: Store) -> None:
    # The twin for threads keeps one listener for its whole life: no refusal falls between two.
    # The same counts hold for both.
    run = store.new_run(**ONE_GROUP)
    before = num_reads(store.client)
    listeners: set[str] = set()

    with Publisher(store.url, run) as publisher:
        publisher.publish(group("g0")).result(10)
        for step in STEPS:
            receipt = publisher.publish(group(f"g{step}"))
            wait_until(lambda: len(blocked(store.client)) == 1, describe="the listener")
            listeners.update(blocked(store.client))
            store.read(run).frees_capacity(stepped=step)
            receipt.result(10)
        when_idle = blocked(store.client)

    assert len(listeners) == 1
    assert when_idle == []
    assert num_reads(store.client) - before == len(STEPS)
