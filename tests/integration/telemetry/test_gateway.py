"""Requests to a gateway, and what is seen of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
import redis

from testkit import wait_until
from testkit.requests.ingest import IngestClient, turn_fields
from testkit.services.gateway_thread import GatewayThread
from testkit.services.scrapes import own_scrape
from testkit.turns import turn
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.keys.store import create_key

TURN = turn("ab", "CD", logprobs=-0.5)


@pytest.fixture
def gateway(server: EmbeddedServer) -> Iterator[GatewayThread]:
    with GatewayThread(server.url) as gateway:
        yield gateway


def _item() -> dict[str, Any]:
    return {"group_id": "g", "sample": 0, "num_samples": 1, "turn": 0, **turn_fields(TURN)}


def test_requests_are_counted_by_route_and_status(
    gateway: GatewayThread, client: redis.Redis, new_run: Callable[..., str]
) -> None:
    name, run = "turnstream_gateway_http_requests_total", new_run(client)
    before = own_scrape()

    with IngestClient(gateway, run) as ingest:
        ingest.turn(0, TURN)
        ingest.turn(1, TURN, seal={"reward": 1.0})
        ingest.http.post("runs/another/turns", json={"items": [_item()]})
        for path in ("/v1/nothing", "/nothing/at/all", f"/{'x' * 200}"):
            httpx2.get(f"{gateway.base_url}{path}")

    # A request is counted after its answer has been sent.
    answered = sum(before.get(name, {}).values()) + 6
    wait_until(lambda: sum(own_scrape()[name].values()) >= answered, describe="six requests")
    after = own_scrape()
    new = {k: n - before.value(name, *k) for k, n in after[name].items()}
    new = {labels: number for labels, number in new.items() if number}
    assert new[("POST", "/v1/runs/{run}/turns", "200")] == 2
    assert new[("GET", "none", "404")] == 3
    assert {route for _, route, _ in new} == {"/v1/runs/{run}/turns", "none"}
    seconds = "turnstream_gateway_http_request_seconds_count"
    errors = "turnstream_gateway_errors_total"
    assert after.value(errors, "RunNotFoundError") > before.value(errors, "RunNotFoundError")
    labels = ("POST", "/v1/runs/{run}/turns")
    assert after.value(seconds, *labels) - before.value(seconds, *labels) == 3


def test_ingest_is_counted_by_outcome(
    gateway: GatewayThread, client: redis.Redis, new_run: Callable[..., str]
) -> None:
    before = own_scrape()

    with IngestClient(gateway, new_run(client)) as ingest:
        ingest.turn(0, TURN, seal={"reward": 1.0})
        ingest.turn(0, turn("ab", "CX", logprobs=-0.5))
    after = own_scrape()

    def new(what: str, *labels: str) -> float:
        name = f"turnstream_gateway_ingested_{what}_total"
        return after.value(name, *labels) - before.value(name, *labels)

    assert [new("turns", "stored"), new("turns", "refused"), new("tokens")] == [1, 1, 4]
    assert [new("trajectories", "sealed"), new("trajectories", "refused")] == [1, 1]


def test_request_id_is_returned_and_in_the_lines_of_the_request(
    gateway: GatewayThread,
    client: redis.Redis,
    new_run: Callable[..., str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = new_run(client)
    item = {**_item(), "group_id": "g 7"}
    url = f"{gateway.base_url}/v1/runs/{run}/turns"

    with caplog.at_level(logging.DEBUG, logger="turnstream_server.gateway"):
        sent = [
            httpx2.post(url, json={"items": [item]}, headers={"X-Request-ID": given})
            for given in ("client-7", "with space", "x" * 129, "")
        ]

    returned = [each.headers["x-request-id"] for each in sent]
    assert returned[0] == "client-7"
    assert len({*returned}) == 4
    assert all(len(each) == 32 for each in returned[1:])
    stored = [each for each in caplog.records if each.message == "stored"]
    assert {(vars(each)["run"], vars(each)["trajectory"]) for each in stored} == {
        (run, "g%207/0/0")
    }
    requests = [each for each in caplog.records if each.message == "POST /v1/runs/{run}/turns"]
    assert {vars(each)["run"] for each in requests} == {run}
    assert {each.levelname for each in requests} == {"INFO"}


def test_metrics_need_the_role_read_where_keys_are_required(
    server: EmbeddedServer, client: redis.Redis
) -> None:
    keys = [create_key(client, role, roles=[role]) for role in ("read", "produce")]
    with GatewayThread(server.url, requires_key=True) as gateway:

        def status(path: str, key: str) -> int:
            return httpx2.get(f"{gateway.base_url}{path}", headers={"X-API-Key": key}).status_code

        found = [status("/metrics", key) for key in (*keys, "tml-unknown")]
        found.append(httpx2.get(f"{gateway.base_url}/metrics").status_code)
        health = [httpx2.get(f"{gateway.base_url}/{each}") for each in ("healthz", "readyz")]

    assert found == [200, 403, 401, 401]
    assert [each.status_code for each in health] == [200, 200]
    assert health[1].json()["dependencies"]["base_models"] == {
        "ready": False,
        "needed": False,
        "reason": "no worker serves a base model",
    }


def test_readyz_says_that_the_store_is_away(own_server: EmbeddedServer) -> None:
    with GatewayThread(own_server.url, poll_s=0.1) as gateway:
        before = httpx2.get(f"{gateway.base_url}/readyz", timeout=20).status_code
        own_server.kill()
        httpx2.get(f"{gateway.base_url}/healthz", timeout=20).raise_for_status()

        def refusal() -> dict[str, str]:
            answer = httpx2.get(f"{gateway.base_url}/readyz", timeout=20)
            return answer.json()["dependencies"]["store"] if answer.status_code == 503 else {}

        wait_until(lambda: bool(refusal()), describe="a store that is not ready")
        assert "cannot be reached" in refusal()["reason"]
    assert before == 200
