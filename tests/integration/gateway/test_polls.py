"""Polls of results: pending, woken, held through an outage, and ended at a stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import pytest
import redis.asyncio

from testkit import wait_until, wait_until_async
from testkit.services.gateway_thread import GatewayThread
from testkit.training.canned_worker import CannedWorker
from turnstream.errors import StoreUnavailableError
from turnstream.store.client.connection import connect_async
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway.polls import Polls
from turnstream_server.models.sampling_params import SamplingParams
from turnstream_server.operations import results as stored_results
from turnstream_server.operations.keys import RESULTS, RequestId, model_keys, parse_request_id
from turnstream_server.operations.models import BaseModel
from turnstream_server.operations.results import FETCHED_S, UNFETCHED_S, drop_due
from turnstream_server.operations.samplers import read_sampler, submit_sample

NUM_POLLS = 300


def test_a_pending_poll_is_held_and_then_repeated(
    worker: CannedWorker, new_gateway: Callable[..., GatewayThread], new_api: Callable[..., Any]
):
    api = new_api(new_gateway(poll_s=0.3))
    sampler = api.sampler()
    worker.may_run.clear()
    request_id = api.sample(sampler, 1).json()["request_id"]

    began_s = time.monotonic()
    pending = api.post("retrieve_future", request_id=request_id)
    waited_s = time.monotonic() - began_s
    worker.may_run.set()

    assert 0.3 <= waited_s < 5
    assert pending.status_code == 408
    assert pending.json() == {
        "type": "try_again",
        "request_id": request_id,
        "queue_state": "active",
    }
    wait_until(lambda: api.post("retrieve_future", request_id=request_id).status_code == 200)


def test_requests_that_never_came_are_unknown(api: Any):
    model, sampler = api.model(), api.sampler()
    wrong = ["", "x", "S:train:0", "S:train:0:1", "S:sample:0:-1", f"{model}:7", f"{sampler}:7"]

    answers = [api.post("retrieve_future", request_id=each) for each in wrong]

    assert [each.status_code for each in answers] == [404] * len(wrong)


async def test_large_results_are_dropped_after_their_time_and_never_run_again(
    api: Any, worker: CannedWorker, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
):
    model, sampler = api.model(), api.sampler()
    small, large, unfetched = (
        api.train(model, number, num_datums=count).json()["request_id"]
        for number, count in ((1, 1), (2, 300), (3, 300))
    )
    sample = api.sample(sampler, 1, num_samples=50).json()["request_id"]
    for each in (small, large, sample):
        api.result(each)

    async with connect_async(server.url) as client:
        key, number = model_keys(model).results, parse_request_id(unfetched).number
        await wait_until_async(lambda: client.hexists(key, str(number)), describe="its result")
        now_s, _ = await client.time()
        due_ms = {each: await client.zscore(RESULTS, each) for each in (large, sample, unfetched)}
        is_kept = await client.zscore(RESULTS, small) is None
        left_s = [(due or 0) / 1000 - now_s for due in due_ms.values()]
        size = await client.memory_usage(key) or 0
        monkeypatch.setattr(stored_results, "_MOST", 2)  # two pages, and an empty one
        reads_before = await num_reads(client, "zrangebyscore")
        await client.zadd(RESULTS, dict.fromkeys(due_ms, 0))
        await drop_due(client)  # the gateway may do so at the same time
        num_pages = await num_reads(client, "zrangebyscore") - reads_before
        size_after = await client.memory_usage(key) or 0

    assert is_kept
    assert left_s == pytest.approx([FETCHED_S, FETCHED_S, UNFETCHED_S], abs=60)
    assert num_pages >= 3
    assert size_after < size / 10
    for each in due_ms:
        again = api.post("retrieve_future", request_id=each)
        assert again.status_code == 410
        assert "is deleted: a result is kept for 120 s after its first fetch" in again.text
    assert api.train(model, 2, num_datums=300).json()["request_id"] == large
    assert api.sample(sampler, 1, num_samples=50).json()["request_id"] == sample
    assert api.result(small)["metrics"] == {"loss:sum": 11.0}
    api.result(api.train(model, 4).json()["request_id"])
    assert [worker.ran.count(each) for each in (large, unfetched)] == [1, 1]
    assert api.post("retrieve_future", request_id=sample).status_code == 410


async def post(gateway: GatewayThread, route: str, **content: Any) -> Any:
    """Return the answer of an accepted request; many connections of httpx2 are slow."""
    body = json.dumps(content).encode()
    lines = [
        f"POST /api/v1/{route} HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        "X-API-Key: tml-own",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    reader, writer = await asyncio.open_connection(*gateway.address.split(":"))
    with contextlib.closing(writer):
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    return json.loads(answer)


async def submit_samples(client: redis.asyncio.Redis, sampler_id: str, *, count: int) -> list[str]:
    """Return the ids of samples whose only token is their number, without a call of a gateway."""
    record = await read_sampler(client, sampler_id)
    params = SamplingParams(max_tokens=1)
    return [
        str(await submit_sample(client, record, each, np.array([each], np.int32), params))
        for each in range(count)
    ]


async def num_reads(client: redis.asyncio.Redis, command: str = "hget") -> int:
    """Return how often a command ran; a poll reads a field at its start and after a wake."""
    found: Any = await client.info("commandstats")
    return found.get(f"cmdstat_{command}", {"calls": 0})["calls"]


async def heartbeat_s(gateway: GatewayThread, session_id: str) -> float:
    """Return the seconds of a heartbeat, the fastest of three on a busy machine."""
    each_s: list[float] = []
    for _ in range(3):
        began_s = time.monotonic()
        await post(gateway, "session_heartbeat", session_id=session_id)
        each_s.append(time.monotonic() - began_s)
    return min(each_s)


@contextlib.asynccontextmanager
async def running(
    calls: Iterable[Coroutine[Any, Any, Any]],
) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Run the calls in the block, and end those that are left: their files are closed."""
    tasks = [asyncio.create_task(each) for each in calls]
    try:
        yield tasks
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_many_polls_are_held_and_each_wakes_for_its_own_result(
    server: EmbeddedServer,
    new_gateway: Callable[..., GatewayThread],
    new_api: Callable[..., Any],
    worker: CannedWorker,
):
    gateway = new_gateway(poll_s=900.0)  # one without a notification is held so long
    sampler = new_api(gateway).sampler()
    session = sampler.partition(":")[0]
    worker.may_run.clear()

    async with connect_async(server.url) as client:
        ids = await submit_samples(client, sampler, count=NUM_POLLS)
        reads_before = await num_reads(client)

        async def all_are_held() -> bool:
            return await num_reads(client) - reads_before >= NUM_POLLS

        calls = [post(gateway, "retrieve_future", request_id=each) for each in ids]
        async with running(calls) as polls:
            await wait_until_async(
                lambda: gateway.num_requests == NUM_POLLS, describe="all polls in progress"
            )
            await wait_until_async(all_are_held, describe="the first read of all polls")
            beat_s = await heartbeat_s(gateway, session)
            num_early = sum(each.done() for each in polls)

            reads_before = await num_reads(client)
            worker.may_run.set()
            beat_of_wake_s = await heartbeat_s(gateway, session)
            async with asyncio.timeout(240):
                results = await asyncio.gather(*polls)
            reads_of_wake = await num_reads(client) - reads_before

    assert num_early == 0
    assert max(beat_s, beat_of_wake_s) < 5.0  # a client sends the next one after 10 s
    assert [each["sequences"][0]["tokens"] for each in results] == [[i] for i in range(NUM_POLLS)]
    assert reads_of_wake < 5 * NUM_POLLS  # a wake of all polls by each event reads far more


@pytest.mark.slow
def test_polls_are_held_while_the_store_is_away(
    own_server: EmbeddedServer, base: BaseModel, new_api: Callable[..., Any]
):
    with (
        GatewayThread(own_server.url, poll_s=2.0) as gateway,
        CannedWorker(own_server.url, base) as worker,
    ):
        api = new_api(gateway)
        model = api.model()
        worker.may_run.clear()
        request_id = api.train(model, 1).json()["request_id"]
        own_server.kill()

        submitted = api.train(model, 2)
        began_s = time.monotonic()
        held = api.post("retrieve_future", request_id=request_id)
        held_s = time.monotonic() - began_s
        own_server.restart()
        worker.may_run.set()

        assert submitted.status_code == 503
        assert "store" in submitted.json()["detail"]
        assert held.status_code == 408
        assert held_s >= 2.0
        assert api.result(request_id)["metrics"] == {"loss:sum": 11.0}
        assert api.train(model, 2).status_code == 200


async def test_poll_whose_read_failed_reads_again_before_its_end(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("turnstream_server.gateway.polls._BLOCK_S", 0.1)
    model, request_id = "S:train:0", RequestId("S:train:0", 1)
    failures = iter([StoreUnavailableError("the store has too many connections")] * 2)

    async def check() -> None:
        for failure in failures:  # the first one may be before the first read of the subscription
            raise failure

    async with connect_async(server.url) as client, connect_async(server.url) as listener:
        await client.hset(model_keys(model).commands, "1", "")
        await client.hset(model_keys(model).results, "1", "the result")
        held = Polls(client, listener)
        async with asyncio.timeout(30), held.listening():
            found = await held.result(request_id, hold_s=600, check=check)

    assert found == b"the result"


async def test_poll_whose_cancellation_is_lost_ends_with_the_gateway(server: EmbeddedServer):
    request_id = RequestId("S:train:9", 1)

    async with connect_async(server.url) as client:
        await client.hset(model_keys(request_id.target).commands, "1", "")
        held = Polls(client, client)

        async def check() -> None:
            held.close()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

        async with asyncio.timeout(30):
            assert await held.result(request_id, hold_s=600, check=check) is None


def test_a_stop_ends_held_polls_at_once(
    worker: CannedWorker, new_gateway: Callable[..., GatewayThread], new_api: Callable[..., Any]
):
    gateway = new_gateway(poll_s=60.0, shutdown_grace_s=30.0)
    api = new_api(gateway)
    sampler = api.sampler()
    worker.may_run.clear()
    request_id = api.sample(sampler, 1).json()["request_id"]

    with ThreadPoolExecutor() as threads:
        poll = threads.submit(api.post, "retrieve_future", request_id=request_id)
        wait_until(lambda: gateway.num_requests == 1)
        began_s = time.monotonic()
        gateway.stop()
        stopped_s = time.monotonic() - began_s

        assert poll.result(5).status_code == 408
        assert stopped_s < 10


def test_answers_are_not_delayed_by_the_connection(gateway: GatewayThread):
    # A listening socket without TCP_NODELAY made each answer wait 40 ms for an acknowledgement.
    with httpx2.Client(base_url=gateway.base_url) as http:

        def seconds() -> float:
            began_s = time.perf_counter()
            http.get("/api/v1/healthz")
            return time.perf_counter() - began_s

        every = [seconds() for _ in range(60)]

    # Acknowledgements are delayed only on a connection that has carried some data.
    assert min(every[30:]) < 0.03
