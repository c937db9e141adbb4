"""Limits of bodies in both APIs: what is unpacked, what stops to arrive, and the shared memory."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Callable, Iterator

import httpx2
import pytest
import redis
import zstandard

from testkit import wait_until
from testkit.gateway_thread import GatewayThread
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway import bodies
from turnstream_server.keys.records import KeyLimits
from turnstream_server.keys.store import create_key

_REST, _TINKER = "/v1/runs/any/turns", "/api/v1/create_session"
_ITEMS = json.dumps({"items": [], "x": "-" * 2_000}).encode()


@pytest.fixture(scope="module")
def gateway(server: EmbeddedServer) -> Iterator[GatewayThread]:
    with GatewayThread(server.url, requires_key=True) as gateway:
        yield gateway


NewKey = Callable[..., dict[str, str]]


@pytest.fixture
def new_key(client: redis.Redis, request: pytest.FixtureRequest) -> NewKey:
    """`new_key("a", max_body_bytes=5)` returns the headers of a new key with these limits."""

    def new(name: str, **limits: float) -> dict[str, str]:
        roles = ["produce", "train"]
        name = f"{request.node.name} {name}"
        key = create_key(client, name, roles=roles, limits=KeyLimits(**limits))  # pyright: ignore[reportArgumentType]
        return {"X-API-Key": key, "Content-Type": "application/json"}

    return new


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_limits_of_a_key_count_the_unpacked_bytes(
    gateway: GatewayThread, new_key: NewKey, encoding: str
) -> None:
    compress = {"gzip": gzip.compress, "zstd": zstandard.ZstdCompressor().compress}[encoding]
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    with httpx2.Client(base_url=gateway.base_url, timeout=60) as http:

        def send(key: dict[str, str]) -> int:
            body = compress(_ITEMS)
            return http.post(_REST, content=body, headers={**headers, **key}).status_code

        small, slow = new_key("small", max_body_bytes=1_000), new_key("slow", bytes_per_s=100)
        statuses = [send(small), *[send(slow) for _ in range(2)]]

    assert len(compress(_ITEMS)) < 100
    assert statuses == [413, 422, 429]


def test_body_that_stops_to_arrive_is_dropped(
    gateway: GatewayThread, new_key: NewKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "STALLED_S", 0.2)
    host, _, port = gateway.address.partition(":")
    for path in (_REST, _TINKER):
        lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Length: 1000"]
        lines += ["Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in new_key(path).items()]
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall("\r\n".join([*lines, "", "{"]).encode())
            answer = b"".join(iter(lambda: connection.recv(65_536), b""))

        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"no byte of the body has arrived for 0.2 s" in answer


def test_bodies_in_flight_share_one_memory_limit(
    gateway: GatewayThread, new_key: NewKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_OWNER_BYTES", 5_000)
    monkeypatch.setattr(bodies, "MAX_SHARED_BYTES", 8_000)
    first, second = new_key("first"), new_key("second")
    unpacked = {"content-encoding": "gzip", "content-type": "application/json"}
    with httpx2.Client(base_url=gateway.base_url, timeout=60) as http:

        def post(key: dict[str, str]) -> httpx2.Response:
            return http.post(_TINKER, content=b" " * 1_000, headers=key)

        def held_body() -> Iterator[bytes]:
            yield b"{" * 4_500
            wait_until(lambda: post(first).status_code == 429, describe="the body in flight")
            bomb = gzip.compress(b" " * 3_600)
            statuses.extend([post(first), post(second)])
            statuses.append(http.post(_REST, content=bomb, headers={**second, **unpacked}))

        statuses: list[httpx2.Response] = []
        with httpx2.Client(base_url=gateway.base_url, timeout=60) as other:
            held = other.post(_TINKER, content=held_body(), headers=first)
        after = http.post(_TINKER, content=b" " * 4_500, headers=first)

    assert [each.status_code for each in statuses] == [429, 400, 429]
    assert statuses[0].headers["retry-after"] == statuses[2].headers["retry-after"] == "1"
    assert [held.status_code, after.status_code] == [400, 400]  # no JSON


@pytest.mark.parametrize("path", [_REST, _TINKER, "/v1/runs/any/tasks"])
def test_aborted_upload_is_no_error_of_the_gateway(
    gateway: GatewayThread, new_key: NewKey, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    host, _, port = gateway.address.partition(":")
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Length: 1000"]
    lines += ["Content-Type: application/json", f"X-API-Key: {new_key('a')['X-API-Key']}"]
    with caplog.at_level("INFO"):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall("\r\n".join([*lines, "", "{"]).encode())
            wait_until(lambda: gateway.num_requests == 1, describe="the upload")
        wait_until(lambda: "POST /" in caplog.text, describe="the line of the request")

    assert [each.message for each in caplog.records if each.levelname in ("WARNING", "ERROR")] == []


def test_body_that_is_no_http_is_no_error_of_the_gateway(
    gateway: GatewayThread, new_key: NewKey, caplog: pytest.LogCaptureFixture
) -> None:
    host, _, port = gateway.address.partition(":")
    key = f"X-API-Key: {new_key('a')['X-API-Key']}"
    for own in ([], [key], ["Origin: http://elsewhere.example"]):  # the last one is refused at once
        lines = [f"POST {_REST} HTTP/1.1", "Host: x", "Transfer-Encoding: chunked", *own]
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall("\r\n".join([*lines, "", "no length\r\n{"]).encode())
            answer = b"".join(iter(lambda: connection.recv(65_536), b""))

        assert answer.startswith(b"HTTP/1.1 400 ")
    wait_until(lambda: caplog.text.count("Invalid HTTP") == 3, describe="three warnings")

    assert [each.message for each in caplog.records if each.levelname == "ERROR"] == []
