"""Jumps of the store's clock: no deadline fires too early or much too late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import redis

from testkit import ids, wait_until_async
from turnstream.errors import ObserverExpiredError
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream.store.client.connection import connect, connect_async
from turnstream_server.bus.sessions.observers import declare_observer, note_observed

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

HOUR_S = 3600
LEASE_S = 0.4


def open_and_await(publisher: Publisher) -> None:
    """A group that hangs, and one whose rewards do not come."""
    publisher.trajectory("hangs", 0, num_samples=1).append(ids("ab"), ids("c"))
    awaited = publisher.trajectory("waits", 0, num_samples=1)
    awaited.append(ids("ab"), ids("c"))
    awaited.seal(awaits_reward=True)
    publisher.flush(10)


def deadlines(client: redis.Redis, run: str) -> set[bytes]:
    found: Any = client.zrange(keys.run_keys(run).deadlines, 0, -1)
    return set(found)


def observers(client: redis.Redis, run: str) -> dict[bytes, bytes]:
    """Those that are not forgotten."""
    found: Any = client.hgetall(keys.run_keys(run).observers)
    return {name: entry for name, entry in found.items() if b":0:" not in entry}


def with_one_due_soon(client: redis.Redis, run: str) -> set[bytes]:
    """The deadlines, with that of a group that is not there, in a moment of the run's time."""
    names = keys.run_keys(run)
    ms: Any = client.hget(names.clock, "ms")
    pipeline = client.pipeline(transaction=True)
    pipeline.zadd(names.deadlines, {"group:soon": int(ms) + 200})
    pipeline.zrange(names.deadlines, 0, -1)
    found: Any = pipeline.execute()
    return set(found[1])


async def until(what: str, condition: Callable[[], bool]) -> None:
    async def is_so() -> bool:
        return condition()

    await wait_until_async(is_so, describe=what)


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
async def test_a_jump_ends_nothing_early_and_puts_nothing_off(house_at, clocked_server, jump_s):
    # A living group was dropped within seconds, and an observer that calls was told it was silent.
    # Or what was to end in a moment held its place for an hour longer.
    house = house_at(clocked_server.url)
    run = house.create_run(
        lease_s=LEASE_S, takeover_s=600, group_deadline_s=20, reward_deadline_s=20
    )
    await house.start_batcher()
    async with connect_async(house.url) as caller:
        for name, expiry_s in ((b"alive", 600), (b"silent", 0.5)):
            await declare_observer(
                caller, run, observer=name.decode(), first_step=1, expiry_s=expiry_s
            )
        with Publisher(house.url, run) as publisher, connect(house.url) as client:
            await asyncio.to_thread(open_and_await, publisher)
            before = with_one_due_soon(client, run)

            clocked_server.set_clock(jump_s)
            await until("the deadline", lambda: b"group:soon" not in deadlines(client, run))
            await until("the end of the silent", lambda: b"silent" not in observers(client, run))

            assert (len(before), before - deadlines(client, run)) == (4, {b"group:soon"})
            assert await note_observed(caller, run, observer="alive") == 600
            with pytest.raises(ObserverExpiredError):
                await note_observed(caller, run, observer="silent")
