"""One tenant floods a door, and another one uses it.

A time depends on the machine. So a test counts what the service answered to the flood while one
request of the other tenant was in work. Where all connections share in turn, it is their number.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import grpc
import httpx2
import pytest
import redis

from testkit import wait_until
from testkit.requests.floods import flooding, http_request
from testkit.requests.ingest import IngestClient
from testkit.services.batchers import BatcherThread
from testkit.services.gateway_thread import GatewayThread
from testkit.services.stores import RunReader
from turnstream.types import TrajectoryKey
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream_server.batcher.serving.running_calls import RunningCalls
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway.observing import ObservedApp
from turnstream_server.gateway.rest.runs import events
from turnstream_server.keys.store import create_key

pytestmark = [pytest.mark.redis]

CONNECTIONS: Final = 32
"""Connections of the flood."""

MOST: Final = 8
"""Answers to the flood during one request of the other tenant, median. A gateway has two requests
of a key in work, a batcher four."""

_COUNT: Final = 15
_numbers = itertools.count(1)


class Tenants(NamedTuple):
    """Keys and runs of two tenants; A floods."""

    key_a: str
    key_b: str
    run_a: str
    run_b: str


@pytest.fixture
def tenants(client: redis.Redis, new_run: Callable[..., str]) -> Tenants:
    runs = [new_run(client) for _ in range(2)]
    keys = [
        create_key(client, f"tenant {next(_numbers)}", roles=["produce", "train", "read"])
        for _ in range(2)
    ]
    return Tenants(*keys, *runs)


@pytest.fixture(scope="module")
def keyed_gateway(server: EmbeddedServer) -> Iterator[GatewayThread]:
    with GatewayThread(server.url, requires_key=True) as gateway:
        yield gateway


class Answered:
    """The requests that a service has answered, in order.

    Attributes:
        num: all of them.
        during: for each request of the other tenant, how many were answered while it was in work.
    """

    def __init__(self) -> None:
        self.num = 0
        self.during: list[int] = []

    @contextlib.contextmanager
    def one(self, *, is_other: bool) -> Iterator[None]:
        """Count the answer at the end of the block."""
        before = self.num
        try:
            yield
        finally:
            if is_other:
                self.during.append(self.num - before)
            self.num += 1


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch, tenants: Tenants) -> Answered:
    """Count of the answers of services in this process."""
    answered, key = Answered(), tenants.key_b
    of_http, of_grpc = ObservedApp.__call__, RunningCalls.answering

    async def serve(self: Any, scope: Any, receive: Any, send: Any) -> None:
        with answered.one(is_other=(b"x-api-key", key.encode()) in scope["headers"]):
            await of_http(self, scope, receive, send)

    @contextlib.asynccontextmanager
    async def answer(self: Any, context: Any, *, call: str) -> AsyncIterator[None]:
        metadata = dict(context.invocation_metadata())
        with answered.one(is_other=metadata.get("x-api-key") == key):
            async with of_grpc(self, context, call=call):
                yield

    monkeypatch.setattr(ObservedApp, "__call__", serve)
    monkeypatch.setattr(RunningCalls, "answering", answer)
    return answered


def turn_item(group: str, number: int) -> dict[str, Any]:
    tokens = {"prompt_ids": [1, 2, 3], "response_ids": [4]}
    return {"group_id": group, "sample": 0, "num_samples": 1, "turn": number, **tokens}


@pytest.mark.parametrize("door", ["turns", "reads", "tinker", "agents", "strangers"])
def test_flood_of_one_key_delays_another_by_few_requests(
    keyed_gateway: GatewayThread,
    client: redis.Redis,
    tenants: Tenants,
    answered: Answered,
    door: str,
) -> None:
    key, run = tenants.key_a, tenants.run_a
    headers = {"X-API-Key": tenants.key_b}

    def flood(connection: int, number: int) -> bytes:
        match door:
            case "turns":
                content = {"items": [turn_item(f"a-{connection}", number)]}
                return http_request("POST", f"/v1/runs/{run}/turns", key=key, content=content)
            case "reads":
                return http_request("GET", f"/v1/runs/{run}", key=key)
            case "agents":
                return http_request("GET", "/openai/v1/none", key=agents[connection])
            case "tinker":
                beat = {"session_id": sessions[key]}
                return http_request("POST", "/api/v1/session_heartbeat", key=key, content=beat)
            case _:
                made_up = f"tml-{connection}-{number}" if number % 2 else ""
                return http_request("GET", "/v1/openapi.json", key=made_up)

    with (
        IngestClient(keyed_gateway, tenants.run_b) as ingest,
        httpx2.Client(base_url=keyed_gateway.base_url, headers=headers, timeout=60) as http,
    ):
        ingest.http.headers.update(headers)
        sessions = {
            each: http.post(
                "/api/v1/create_session",
                json={"tags": [], "user_metadata": {}},
                headers={"X-API-Key": each},
            ).json()["session_id"]
            for each in (tenants.key_a, tenants.key_b)
        }
        agents = [
            http.post(
                f"/v1/runs/{run}/sessions",
                json={"group_id": f"a-{number}", "sample": 0, "num_samples": 1},
                headers={"X-API-Key": key},
            ).json()["key"]
            for number in range(CONNECTIONS)
        ]
        assert ingest.turn(0, None, **turn_item("g", 0))["status"] == 201
        with flooding(keyed_gateway.address, flood, num_connections=CONNECTIONS) as statuses:
            wait_until(lambda: answered.num > 2 * CONNECTIONS, describe="the flood")
            answered.during.clear()
            for number in range(1, _COUNT + 1):
                if door == "tinker":
                    beat = {"session_id": sessions[tenants.key_b]}
                    http.post("/api/v1/session_heartbeat", json=beat).raise_for_status()
                else:
                    ingest.turn(number, None, **turn_item("g", number))
        wait_until(lambda: keyed_gateway.num_requests == 0, describe="the end of all requests")

    assert len(answered.during) == _COUNT
    assert statistics.median(answered.during) <= MOST
    accepted = {"strangers": {200, 429}, "agents": {404}}.get(door, {200})
    assert not set(statuses) - accepted
    stored = RunReader(client, tenants.run_b).turns(TrajectoryKey("g", 0))
    assert len(stored) == 1 + _COUNT * (door != "tinker")  # nothing of the other tenant is lost


def test_flood_of_grpc_calls_delays_another_key_by_few(
    server: EmbeddedServer, tenants: Tenants, answered: Answered
) -> None:
    path = "/turnstream.wire.v1.Batches/Observe"

    def observe(channel: grpc.Channel, key: str, run: str, observer: str) -> None:
        request = wire.ObserveRequest(run=run, observer=observer, expiry_s=60.0)
        metadata = (("x-api-key", key),)
        channel.unary_unary(path)(request.SerializeToString(), timeout=60, metadata=metadata)

    with (
        BatcherThread(server.url, requires_key=True) as batcher,
        grpc.insecure_channel(batcher.target) as channel,
        ThreadPoolExecutor(CONNECTIONS) as threads,
    ):
        has_ended = False

        def flood(connection: int) -> None:
            while not has_ended:
                observe(channel, tenants.key_a, tenants.run_a, f"a-{connection % 4}")

        floods = [threads.submit(flood, each) for each in range(CONNECTIONS)]
        wait_until(lambda: answered.num > 2 * CONNECTIONS, describe="the flood")
        with grpc.insecure_channel(batcher.target) as own:
            for _ in range(_COUNT):
                observe(own, tenants.key_b, tenants.run_b, "b")
        has_ended = True
        for each in floods:
            each.result()

    assert len(answered.during) == _COUNT
    assert statistics.median(answered.during) <= MOST


async def test_streams_and_slow_bodies_of_one_key_leave_room_for_another(
    server: EmbeddedServer, tenants: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_OF_KEY", 4)
    key, run = tenants.key_a, tenants.run_a
    stream = http_request("GET", f"/v1/runs/{run}/events", key=key)
    content = {"items": [turn_item("a", 0)]}
    slow = http_request("POST", f"/v1/runs/{run}/turns", key=key, content=content)[:-1]
    with GatewayThread(server.url, requires_key=True) as gateway:
        held = [await asyncio.open_connection(*gateway.address.split(":")) for _ in range(24)]
        for number, (_, writer) in enumerate(held):
            writer.write(stream if number < 4 else slow)  # the last byte of the others is missing
        for reader, _ in held[:4]:
            assert b" 200 OK" in await reader.readline()

        async with httpx2.AsyncClient(base_url=f"{gateway.base_url}/v1", timeout=60) as http:
            one_more = await http.get(f"runs/{run}/events", headers={"X-API-Key": key})
            http.headers["X-API-Key"] = tenants.key_b
            wait = {"items": [turn_item("b", 0)]}
            sent = await http.post(f"runs/{tenants.run_b}/turns", json=wait)
            async with http.stream("GET", f"runs/{tenants.run_b}/events") as own:
                assert own.status_code == 200
        for _, writer in held:
            writer.close()

    assert (one_more.status_code, one_more.headers["Retry-After"]) == (429, "5")
    assert "4 streams of events of this key are open, the limit of a key" in one_more.text
    assert sent.json()["results"][0]["status"] == 201
