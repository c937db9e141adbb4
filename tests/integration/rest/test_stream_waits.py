"""Waits for new entries of streams, with one connection for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis

from testkit import wait_until_async
from turnstream.errors import UnavailableError
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


async def test_waiters_of_many_streams_share_one_connection(
    waits: StreamWaits, client: redis.Redis
) -> None:
    streams = [keys.run_keys(f"waits-{number}").versions for number in range(50)]
    waiting = [
        asyncio.create_task(waits.wait({stream: "0-0"}, timeout_s=30)) for stream in streams * 4
    ]
    await wait_until_async(lambda: waits.num_waiters == len(waiting))
    await until_blocked(client)

    for stream in streams:
        add(client, "1-0", stream)
    async with asyncio.timeout(PROMPTLY_S):
        await asyncio.gather(*waiting)

    assert waits.num_waiters == 0
    client.delete(*streams)


async def test_stream_that_is_added_later_is_read_at_once(
    waits: StreamWaits, client: redis.Redis
) -> None:
    other = keys.run_keys("waits-other").versions
    first = asyncio.create_task(waits.wait({STREAM: "0-0"}, timeout_s=30))
    await until_blocked(client)
    second = asyncio.create_task(waits.wait({other: "0-0"}, timeout_s=30))
    await wait_until_async(lambda: waits.num_waiters == 2)

    add(client, "1-0", other)

    async with asyncio.timeout(PROMPTLY_S):
        await second
    assert not first.done()
    first.cancel()
    client.delete(other)


async def test_entry_between_read_and_wait_is_not_missed(
    waits: StreamWaits, client: redis.Redis
) -> None:
    add(client, "1-0")
    async with asyncio.timeout(PROMPTLY_S):
        await waits.wait({STREAM: "0-0"}, timeout_s=30)
        add(client, "2-0")
        await wait_until_async(lambda: blocked(client) == 1)
        await waits.wait({STREAM: "1-0"}, timeout_s=30)

    assert await _has_timed_out(waits, known="2-0")


async def test_waiter_that_knows_more_than_the_others_waits_for_more(
    waits: StreamWaits, client: redis.Redis
) -> None:
    first = asyncio.create_task(waits.wait({STREAM: "0-0"}, timeout_s=30))
    second = asyncio.create_task(waits.wait({STREAM: "5-0"}, timeout_s=30))
    await until_blocked(client)

    add(client, "3-0")
    async with asyncio.timeout(PROMPTLY_S):
        await first
    assert not second.done()
    add(client, "6-0")
    async with asyncio.timeout(PROMPTLY_S):
        await second


async def test_waiters_look_again_after_a_lost_connection(
    waits: StreamWaits, client: redis.Redis
) -> None:
    """A restarted store may have lost entries: a position beyond them must not end later waits."""
    add(client, "9-0")
    await waits.wait({STREAM: "0-0"}, timeout_s=30)
    waiting = asyncio.create_task(waits.wait({STREAM: "9-0"}, timeout_s=30))
    await until_blocked(client)
    client.delete(STREAM)
    client.client_kill_filter(_type="normal", skipme=True)

    async with asyncio.timeout(PROMPTLY_S):
        await waiting
    assert await _has_timed_out(waits, known="5-0")
    again = asyncio.create_task(waits.wait({STREAM: "5-0"}, timeout_s=30))
    await until_blocked(client)
    add(client, "6-0")
    async with asyncio.timeout(PROMPTLY_S):
        await again


async def test_streams_without_waiters_are_dropped(
    waits: StreamWaits, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_waits, "_LINGER_S", 0.0)
    monkeypatch.setattr(stream_waits, "MAX_BLOCK_S", 0.1)
    await waits.wait({STREAM: "0-0"}, timeout_s=0.05)

    await wait_until_async(lambda: blocked(client) == 0 and not waits.is_reading)
    waiting = asyncio.create_task(waits.wait({STREAM: "0-0"}, timeout_s=30))
    add(client, "1-0")
    async with asyncio.timeout(PROMPTLY_S):
        await waiting


async def test_waits_end_when_they_are_closed(waits: StreamWaits, client: redis.Redis) -> None:
    waiting = asyncio.create_task(waits.wait({STREAM: "0-0"}, timeout_s=30))
    await until_blocked(client)
    waits.close()

    with pytest.raises(UnavailableError, match="the gateway stops"):
        await waiting
    with pytest.raises(UnavailableError, match="the gateway stops"):
        await waits.wait({STREAM: "0-0"}, timeout_s=30)


async def _has_timed_out(waits: StreamWaits, *, known: str) -> bool:
    """Return whether a wait of a moment lasts until its end."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await waits.wait({STREAM: known}, timeout_s=0.3)
    return loop.time() - began_s >= 0.29
