"""Waits for new entries of streams, with one connection for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest
import redis

from testkit import wait_until_async
from turnstream.store.client import keys
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway import stream_waits
from turnstream_server.gateway.stream_waits import StreamWaits

PROMPTLY_S = 5.0
"""Less than a blocking read."""

STREAM = keys.run_keys("waits").versions


@pytest.fixture
async def waits(server: EmbeddedServer, client: redis.Redis) -> AsyncIterator[StreamWaits]:
    client.delete(STREAM)
    waits = StreamWaits(server.url)
    yield waits
    await waits.stop()
    client.delete(STREAM)


def blocked(client: redis.Redis) -> int:
    info: Any = client.info("clients")
    return info["blocked_clients"]


async def until_blocked(client: redis.Redis) -> None:
    await wait_until_async(lambda: blocked(client) == 1, describe="the blocking read")


def add(client: redis.Redis, entry_id: str, stream: str = STREAM) -> None:
    client.xadd(stream, {"r": b"x"}, id=entry_id)


def begin(waits: StreamWaits, known: str, stream: str = STREAM) -> asyncio.Task[None]:
    return asyncio.create_task(waits.wait({stream: known}, timeout_s=30))


async def promptly(*waiting: Awaitable[None]) -> None:
    async with asyncio.timeout(PROMPTLY_S):
        await asyncio.gather(*waiting)


async def test_stream_that_is_added_later_is_read_at_once(
    waits: StreamWaits, client: redis.Redis
) -> None:
    other = keys.run_keys("waits-other").versions
    first = begin(waits, "0-0")
    await until_blocked(client)
    second = begin(waits, "0-0", other)
    await wait_until_async(lambda: waits.num_waiters == 2)

    add(client, "1-0", other)

    await promptly(second)
    assert not first.done()
    first.cancel()
    client.delete(other)


async def test_waiter_waits_for_entries_that_it_does_not_know(
    waits: StreamWaits, client: redis.Redis
) -> None:
    add(client, "1-0")
    await promptly(waits.wait({STREAM: "0-0"}, timeout_s=30))  # the entry came before the wait
    first, second = begin(waits, "1-0"), begin(waits, "5-0")
    await until_blocked(client)

    add(client, "3-0")
    await promptly(first)
    assert not second.done()
    add(client, "6-0")
    await promptly(second)
    assert await _has_timed_out(waits, known="6-0")


async def test_waiters_look_again_after_a_lost_connection(
    waits: StreamWaits, client: redis.Redis
) -> None:
    """A restarted store may have lost entries: a position beyond them must not end later waits."""
    add(client, "9-0")
    await waits.wait({STREAM: "0-0"}, timeout_s=30)
    waiting = begin(waits, "9-0")
    await until_blocked(client)
    client.delete(STREAM)
    client.client_kill_filter(_type="normal", skipme=True)

    await promptly(waiting)
    assert await _has_timed_out(waits, known="5-0")
    again = begin(waits, "5-0")
    await until_blocked(client)
    add(client, "6-0")
    await promptly(again)


async def test_streams_without_waiters_are_dropped(
    waits: StreamWaits, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_waits, "_LINGER_S", 0.0)
    monkeypatch.setattr(stream_waits, "MAX_BLOCK_S", 0.1)
    await waits.wait({STREAM: "0-0"}, timeout_s=0.05)

    await wait_until_async(lambda: blocked(client) == 0 and not waits.is_reading)
    waiting = begin(waits, "0-0")
    add(client, "1-0")
    await promptly(waiting)


async def _has_timed_out(waits: StreamWaits, *, known: str) -> bool:
    """Return whether a wait of a moment lasts until its end."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await waits.wait({STREAM: known}, timeout_s=0.3)
    return loop.time() - began_s >= 0.29
