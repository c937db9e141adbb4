"""Waiting for results: one subscription for all waiters, also over restarts of the store."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis.asyncio

from testkit import wait_until_async
from testkit.runs.command_logs import BASE, OWNER
from turnstream.store.client.connection import connect, connect_async
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway.polls import Polls, UnknownRequestError
from turnstream_server.operations.contents import CreateModel
from turnstream_server.operations.keys import DONE, RequestId, model_keys, sampler_keys
from turnstream_server.operations.log import ModelLog, submit
from turnstream_server.operations.models import ModelRecord, create_model
from turnstream_server.operations.results import Answer, Failure, decode_result, encode_result
from turnstream_server.operations.samplers import SamplerRecord, refuse_sample, write_sampler_async

LARGE_BYTES = 64 << 20


class Waiting(NamedTuple):
    """The polls of a process, and a model to whose commands they wait."""

    polls: Polls
    client: redis.asyncio.Redis
    url: str
    model_id: str

    async def result(self, request_id: RequestId, *, hold_s: float = 60.0) -> bytes | None:
        """Return the stored bytes of a result, as `Polls.result`."""

        async def check() -> None:
            """Accept every caller."""

        return await self.polls.result(request_id, hold_s=hold_s, check=check)

    async def submit(self, number: int) -> RequestId:
        """Submit a command."""
        return await submit(self.client, self.model_id, number, "optim_step", b"c")

    def run_all(self) -> None:
        """Run all commands as a worker, and answer each with its number."""
        with connect(self.url) as client:
            log = ModelLog.acquire(client, self.model_id, worker="w0", lease_s=60.0)
            while numbers := getattr(log.take(), "numbers", ()):
                log.finish({number: Answer({"n": number}) for number in numbers})

    async def is_blocked(self) -> bool:
        """Return whether exactly one connection waits for results."""
        clients = await self.client.info("clients")
        return clients["blocked_clients"] == 1

    async def num_reads(self) -> int:
        """Return how often a waiter has looked for its request."""
        found = await self.client.info("commandstats")
        return found.get("cmdstat_hexists", {"calls": 0})["calls"]


async def _waiting(server: EmbeddedServer, model_id: str) -> AsyncIterator[Waiting]:
    # Without retries every outage is an error of the subscription.
    blocked = connect_async(server.url, num_retries=0)
    async with connect_async(server.url) as client, blocked:
        polls = Polls(client, blocked)
        record = ModelRecord(model_id, BASE, OWNER, lora_rank=4)
        await create_model(client, record, CreateModel(path=None, optimizer=False))
        async with polls.listening():
            yield Waiting(polls, client, server.url, model_id)


@pytest.fixture
async def waiting(server: EmbeddedServer, request: pytest.FixtureRequest) -> Any:
    """A waiter in the shared store."""
    name = "".join(each for each in request.node.name if each.isalnum())
    async for each in _waiting(server, f"{name}:train:0"):
        yield each


@pytest.fixture
async def own_waiting(own_server: EmbeddedServer) -> Any:
    """A waiter in a store that a test may kill."""
    async for each in _waiting(own_server, "S:train:0"):
        yield each


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and needs glibc")
async def test_next_read_frees_the_buffer_of_a_large_result(waiting: Waiting) -> None:
    small, large = await waiting.submit(1), await waiting.submit(2)
    results = model_keys(waiting.model_id).results
    await waiting.client.hset(results, mapping={"1": b"s", "2": bytes(LARGE_BYTES)})
    await waiting.result(small, hold_s=0.0)
    before = _resident_bytes()

    await waiting.result(large, hold_s=0.0)
    await waiting.result(small, hold_s=0.0)

    assert _resident_bytes() - before < LARGE_BYTES / 2


async def test_result_that_is_there_or_never_comes_needs_no_notification(waiting: Waiting) -> None:
    request_id = await waiting.submit(1)
    assert await waiting.result(request_id, hold_s=0.0) is None
    assert await waiting.result(request_id, hold_s=0.05) is None

    keys = model_keys(waiting.model_id)
    stored = encode_result(Answer({}))
    wait = asyncio.create_task(waiting.result(request_id, hold_s=0.2))
    await asyncio.to_thread(_write, waiting.url, keys.results, stored)  # by a worker that crashed

    assert await wait == stored
    assert await waiting.result(request_id, hold_s=0.0) == stored


def _resident_bytes() -> int:
    """Return the memory of this process, without the free memory of glibc."""
    ctypes.CDLL(None).malloc_trim(0)
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _write(url: str, key: str, stored: bytes) -> None:
    with connect(url) as client:
        client.hset(key, "1", stored)  # pyright: ignore[reportArgumentType]


async def test_notification_without_a_result_does_not_end_a_wait(waiting: Waiting) -> None:
    request_id = await waiting.submit(1)
    waits = [asyncio.create_task(waiting.result(request_id)) for _ in range(2)]
    await wait_until_async(waiting.is_blocked)

    for _ in range(3):
        await waiting.client.xadd(DONE, {"r": str(request_id)})
    await wait_until_async(waiting.is_blocked)
    assert not any(each.done() for each in waits)
    await asyncio.to_thread(waiting.run_all)

    for found in await asyncio.gather(*waits):
        assert decode_result(found or b"") == Answer({"n": 1})


async def test_listener_reports_a_damaged_entry_and_continues(
    waiting: Waiting, caplog: pytest.LogCaptureFixture
) -> None:
    request_id = await waiting.submit(1)
    wait = asyncio.create_task(waiting.result(request_id))
    await wait_until_async(waiting.is_blocked)

    await waiting.client.xadd(DONE, {"r": b"\xff"})

    async def is_reported() -> bool:
        return "'utf-8' codec can't decode" in caplog.text

    await wait_until_async(is_reported)
    await asyncio.to_thread(waiting.run_all)
    async with asyncio.timeout(20.0):
        assert decode_result(await wait or b"") == Answer({"n": 1})


async def test_listening_ends_in_any_state_of_its_connection(server: EmbeddedServer) -> None:
    # A cancellation that came while the client connected was lost, and the process never ended.
    for turns in range(40):
        async with (
            asyncio.timeout(10.0),
            connect_async(server.url) as client,
            connect_async(server.url) as blocked,
            Polls(client, blocked).listening(),
        ):
            for _ in range(turns):
                await asyncio.sleep(0)


async def test_wait_ends_with_an_error_when_its_session_is_closed(waiting: Waiting) -> None:
    request_id = await waiting.submit(1)
    wait = asyncio.create_task(waiting.result(request_id, hold_s=0.2))
    await wait_until_async(waiting.is_blocked)

    await waiting.client.delete(*model_keys(waiting.model_id))

    with pytest.raises(UnknownRequestError):
        await wait


async def test_refusals_notify_their_waiters(waiting: Waiting) -> None:
    refusal = Failure("refused", "user")
    sampler = SamplerRecord(f"{waiting.model_id.partition(':')[0]}:sample:0", BASE, OWNER)
    await write_sampler_async(waiting.client, sampler)
    # A number that a gateway has recorded, and whose result the next call writes.
    keys = sampler_keys(sampler.sampler_id)
    await waiting.client.hset(keys.samples, "1", "f")  # pyright: ignore[reportGeneralTypeIssues]
    request_id = RequestId(sampler.sampler_id, 1)
    await wait_until_async(waiting.is_blocked)
    before = await waiting.num_reads()
    wait = asyncio.create_task(waiting.result(request_id))

    async def has_read() -> bool:
        return await waiting.num_reads() > before

    await wait_until_async(has_read)
    await waiting.client.delete(keys.samples)

    await refuse_sample(waiting.client, sampler.sampler_id, 1, refusal)

    assert decode_result(await wait or b"") == refusal


async def test_result_whose_notification_was_lost_is_found_after_a_restart(
    own_waiting: Waiting, own_server: EmbeddedServer
) -> None:
    request_id = await own_waiting.submit(1)
    wait = asyncio.create_task(own_waiting.result(request_id))
    await wait_until_async(own_waiting.is_blocked)
    results = model_keys(own_waiting.model_id).results
    await asyncio.to_thread(_write, own_waiting.url, results, encode_result(Answer({})))

    await asyncio.to_thread(own_server.kill)
    await asyncio.to_thread(own_server.restart)

    async with asyncio.timeout(20.0):
        assert decode_result(await wait or b"") == Answer({})
