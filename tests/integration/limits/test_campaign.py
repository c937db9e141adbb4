"""Latency of one tenant while another one floods a gateway process; run it with `-m campaign`."""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
import redis

from testkit import wait_until
from testkit.requests.floods import Request, exchange, http_request
from testkit.services.gateway_process import GatewayProcess
from turnstream.batching.config import BatchingConfig
from turnstream.store.run.runs import create_run
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.keys.store import create_key

pytestmark = [pytest.mark.campaign, pytest.mark.redis]

MOST: Final = 3.0
"""Largest ratio to the latency of an idle gateway."""

MOST_BYTES: Final = 300 << 20
"""Largest growth of the memory of the gateway."""

_CONFIG: Final = BatchingConfig(batch_groups=1_000, mini_batch_groups=1_000, max_staleness=100)
_FLOODS: Final = (("small", 16), ("small", 64), ("large", 8), ("read", 32), ("document", 16))

_TRIES: Final = 2
"""Rounds of which the better one counts: other programs use the machine too."""

_FLOOD: Final = """
import sys
from testkit.requests.floods import flooding
from test_campaign import requests_of
address, key, run, kind, num = sys.argv[1:]
with flooding(address, requests_of(kind, key, run, "flood"), num_connections=int(num)):
    sys.stdin.read()
"""


def requests_of(kind: str, key: str, run: str, name: str) -> Request:
    """Return the requests of one kind; `name` begins the names of their groups."""
    tokens = {"prompt_ids": [7] * 20, "response_ids": [7] * 10}
    large = {"prompt_ids": [123456] * 3_000, "response_ids": [123456] * 1_000}
    large["logprobs"] = [-0.123456] * 1_000  # pyright: ignore[reportArgumentType]

    def request(connection: int, number: int) -> bytes:
        item: dict[str, Any] = {"group_id": f"{name}-{connection}", "sample": 0, "num_samples": 1}
        match kind:
            case "small":
                item |= {"turn": number, **tokens}
                return http_request(
                    "POST", f"/v1/runs/{run}/turns", key=key, content={"items": [item]}
                )
            case "large":
                item |= {"reward": 1.0, "turns": [large]}
                items = [
                    {**item, "group_id": f"{name}-{connection}-{number}-{i}"} for i in range(49)
                ]
                path = f"/v1/runs/{run}/trajectories"
                return http_request("POST", path, key=key, content={"items": items})
            case "read":
                return http_request("GET", f"/v1/runs/{run}", key=key)
            case _:
                return http_request("GET", "/v1/openapi.json")

    return request


@pytest.fixture
def gateway(
    own_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GatewayProcess]:
    """A gateway process that needs keys."""
    monkeypatch.setenv("TURNSTREAM_KEY_FILE", str(tmp_path / "key"))
    with GatewayProcess(own_server.url, tmp_path / "address") as gateway:
        yield gateway


def latency_s(address: str, request: Request, *, count: int) -> float:
    """Return the median seconds of requests, one after another."""

    async def measured() -> list[float]:
        reader, writer = await asyncio.open_connection(*address.split(":"), limit=1 << 24)
        found: list[float] = []
        for number in range(count):
            sent, began_s = request(0, number), time.perf_counter()
            status, body = await exchange(reader, writer, sent)
            found.append(time.perf_counter() - began_s)
            assert status == 200, body[:300]
            assert b'"status":201' in body, body[:300]
            await asyncio.sleep(0.02)
        writer.close()
        return found

    return statistics.median(asyncio.run(measured()))


def test_latency_of_a_tenant_stays_within_three_times_of_idle(
    own_client: redis.Redis, gateway: GatewayProcess
) -> None:
    process, address = psutil.Process(gateway.pid), gateway.base_url.removeprefix("http://")
    for run in ("a", "b"):
        create_run(own_client, run, _CONFIG)
    key_a, key_b = (create_key(own_client, run, roles=["produce", "read"]) for run in ("a", "b"))
    counts = {"small": 60, "large": 12}

    def latencies(name: str) -> dict[str, float]:
        return {
            kind: latency_s(address, requests_of(kind, key_b, "b", f"{name}-{kind}"), count=count)
            for kind, count in counts.items()
        }

    latencies("warm")
    bytes_before, idle = process.memory_info().rss, [latencies("idle")]
    ratios: dict[str, float] = {}
    for number, (flood, num_connections) in enumerate(_FLOODS * _TRIES):
        arguments = [address, key_a, "a", flood, str(num_connections)]
        path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(__file__).parent)])
        flooding = subprocess.Popen(
            [sys.executable, "-c", _FLOOD, *arguments],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
        )
        time.sleep(3)  # the flood is in full course
        during = latencies(f"during-{number}")
        flooding.communicate()
        idle.append(latencies(f"after-{number}"))
        for kind, found_s in during.items():  # other programs of the machine slow both down
            beside_s = statistics.mean(each[kind] for each in idle[-2:])
            name = f"{kind} next to {num_connections} {flood}"
            ratios[name] = min(found_s / beside_s, ratios.get(name, math.inf))

    assert {name: ratio for name, ratio in ratios.items() if ratio > MOST} == {}
    wait_until(lambda: process.memory_info().rss < bytes_before + MOST_BYTES, describe="the memory")
