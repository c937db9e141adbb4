"""Limits of bodies in both APIs: unpacked bytes, stalled uploads, and the shared memory."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
from collections.abc import Callable, Iterator

import httpx2
import pytest
import redis
import zstandard

from testkit import wait_until
from testkit.services.gateway_thread import GatewayThread
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


@contextlib.contextmanager
def sending(gateway: GatewayThread, path: str, *headers: str, body: str) -> Iterator[socket.socket]:
    """Send a part of a request, and keep its connection open in the block."""
    host, _, port = gateway.address.partition(":")
    lines = [f"POST {path} HTTP/1.1", "Host: x", *headers]
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall("\r\n".join([*lines, "", body]).encode())
        yield connection


def answer_of(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65_536), b""))


def of_key(headers: dict[str, str]) -> list[str]:
    """Return the lines of a request whose body has 1000 bytes."""
    return ["Content-Length: 1000", *(f"{name}: {value}" for name, value in headers.items())]


def test_body_that_stops_to_arrive_is_dropped(
    gateway: GatewayThread, new_key: NewKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "STALLED_S", 0.2)
    for path in (_REST, _TINKER):
        with sending(gateway, path, *of_key(new_key(path)), body="{") as connection:
            answer = answer_of(connection)

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


def test_broken_upload_is_no_error_of_the_gateway(
    gateway: GatewayThread, new_key: NewKey, caplog: pytest.LogCaptureFixture
) -> None:
    key = new_key("a")
    with caplog.at_level("INFO"):
        for number, path in enumerate((_REST, _TINKER, "/v1/runs/any/tasks")):
            with sending(gateway, path, *of_key(key), body="{"):
                wait_until(lambda: gateway.num_requests == 1, describe="the upload")
            wait_until(lambda num=number: caplog.text.count("POST /") > num, describe="its line")
    loud = [each.message for each in caplog.records if each.levelname in ("WARNING", "ERROR")]
    assert loud == []
    # A body that is no HTTP; the last one is refused at once.
    its_key, other_page = f"X-API-Key: {key['X-API-Key']}", "Origin: http://elsewhere.example"
    for own in ([], [its_key], [other_page]):
        chunked = ["Transfer-Encoding: chunked", *own]
        with sending(gateway, _REST, *chunked, body="no length\r\n{") as connection:
            assert answer_of(connection).startswith(b"HTTP/1.1 400 ")
    wait_until(lambda: caplog.text.count("Invalid HTTP") == 3, describe="three warnings")
    assert [each.message for each in caplog.records if each.levelname == "ERROR"] == []
