"""Limits of keys in a gateway, for both APIs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
import redis
from fastapi import FastAPI

from testkit import wait_until
from testkit.services.gateway_thread import GatewayThread
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway import admission
from turnstream_server.gateway.admission import _STRANGER_BYTES
from turnstream_server.keys.records import KeyLimits
from turnstream_server.keys.store import create_key

pytestmark = pytest.mark.redis

TINKER, REST = "/api/v1/client/config", "/v1/no-such-route"
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def gateway(server: EmbeddedServer) -> Iterator[GatewayThread]:
    with GatewayThread(server.url, requires_key=True) as gateway:
        yield gateway


@pytest.fixture
def post(gateway: GatewayThread, client: redis.Redis) -> Iterator[Callable[..., httpx2.Response]]:
    """`post(path, **options)` sends a request with the key that `post.key(**limits)` made last."""
    headers = {"Content-Type": "application/json"}
    with httpx2.Client(base_url=gateway.base_url, headers=headers, timeout=30) as http:

        class Post:
            def key(self, **limits: Any) -> str:
                name = f"limited {next(_numbers)}"
                key = create_key(client, name, roles=["train"], limits=KeyLimits(**limits))
                http.headers["X-API-Key"] = key
                return name

            def __call__(self, path: str, **options: Any) -> httpx2.Response:
                return http.post(path, **options)

        yield Post()


def detail(response: httpx2.Response) -> str:
    """Return the text of a refusal, in the form of its API."""
    is_problem = response.headers["content-type"] == "application/problem+json"
    content = response.json()
    assert is_problem == response.request.url.path.startswith("/v1/")
    assert not is_problem or content["status"] == response.status_code
    return content["detail"]


@pytest.mark.parametrize("path", [TINKER, REST])
def test_requests_above_a_limit_are_refused(post: Any, path: str) -> None:
    name = post.key(requests_per_s=0.01)
    accepted, fast = post(path), post(path)
    post.key(bytes_per_s=10)
    slow = [post(path, content=b"0" * 2_000).status_code for _ in range(2)]
    post.key(max_body_bytes=1_000)
    fits, larger = (post(path, content=b"0" * each) for each in (1_000, 1_001))
    post.key()

    found = [accepted.status_code, fits.status_code, post(path).status_code, slow[0]]
    assert found in ([200] * 4, [404] * 4)
    assert (fast.status_code, slow[1], larger.status_code) == (429, 429, 413)
    assert 60 <= int(fast.headers["Retry-After"]) <= 100
    assert detail(fast).startswith(f"key {name!r} may use 0.01 requests per second: wait ")
    assert detail(larger) == "the body has more than 1000 bytes"


def test_body_without_length_is_counted_as_it_arrives(post: Any) -> None:
    post.key(max_body_bytes=1_000)
    route = "/api/v1/create_session"

    fits, larger = (post(route, content=iter([b"[" * 500] * each)) for each in (2, 3))

    assert fits.status_code == 400  # no JSON
    assert larger.status_code == 413
    post.key(bytes_per_s=500)
    statuses = [post(route, content=iter([b"[" * 1_500])).status_code for _ in range(2)]
    assert statuses == [400, 429]


def test_stranger_sends_no_large_body(post: Any) -> None:
    small, larger = (
        post("/api/v1/create_session", content=b"0" * each, headers={"X-API-Key": "tml-other"})
        for each in (_STRANGER_BYTES, _STRANGER_BYTES + 1)
    )

    assert [small.status_code, larger.status_code] == [401, 401]


def test_strangers_have_a_rate_and_made_up_keys_are_not_all_looked_up(
    gateway: GatewayThread, post: Any, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_STRANGER_LIMITS", KeyLimits(requests_per_s=5.0))
    found: list[httpx2.Response] = []
    with httpx2.Client(base_url=gateway.base_url, timeout=30) as http:
        client.config_resetstat()
        while not found or found[-1].status_code == 200:
            key = {"X-API-Key": f"tml-{len(found)}"} if len(found) % 2 else {}
            found.append(http.get("/v1/openapi.json", headers=key))
    stats: Any = client.info("commandstats")
    post.key()

    assert len(found) > 10  # a burst of two seconds
    assert (found[-1].status_code, found[-1].headers["Retry-After"]) == (429, "1")
    assert "too many requests without an accepted key came from 127.0.0.1" in detail(found[-1])
    assert stats["cmdstat_hget"]["calls"] < len(found)
    # A key that is new to the gateway waits as well, because it may be one more made-up one.
    wait_until(lambda: post(TINKER).status_code == 200, describe="the known key")


def test_openapi_document_is_made_once(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[FastAPI] = []
    make = FastAPI.openapi
    monkeypatch.setattr(FastAPI, "openapi", lambda app: made.append(app) or make(app))
    with GatewayThread(server.url) as gateway:
        found = [httpx2.get(f"{gateway.base_url}/v1/openapi.json") for _ in range(3)]

    assert len(made) == 1
    assert {each.status_code for each in found} == {200}
    assert found[2].json()["servers"] == [{"url": "/v1"}]
    assert found[2].headers["content-type"] == "application/json"
