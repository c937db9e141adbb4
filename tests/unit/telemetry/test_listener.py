"""The listener over a real socket."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testkit import wait_until
from turnstream.errors import InvalidConfigError, TurnstreamError
from turnstream.store.client.api_keys import read_key_file
from turnstream_server import http_server as module
from turnstream_server.http_server import HttpServer
from turnstream_server.listener import serve_metrics
from turnstream_server.observed import observe_process
from turnstream_server.settings import Settings
from turnstream_server.telemetry.instruments import REGISTRY
from turnstream_server.telemetry.readiness import Readiness

KEY = "tml-0123456789abcdef0123456789"

Start = Callable[..., HttpServer]


@pytest.fixture
def readiness() -> Readiness:
    return Readiness("sampler")


@pytest.fixture
def start(readiness: Readiness) -> Iterator[Start]:
    """`start(read_key=...)` starts a listener on a free port."""
    with contextlib.ExitStack() as stack:

        def start(read_key: Callable[[], str] | None = None) -> HttpServer:
            made = serve_metrics("127.0.0.1", 0, readiness=readiness, read_key=read_key)
            return stack.enter_context(made)

        yield start


def get(listener: HttpServer, path: str, *, method: str = "GET", **headers: str) -> tuple[int, str]:
    """Status and body of a request; `x_api_key` is the header X-Api-Key."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"http://127.0.0.1:{listener.port}{path}"
    request = urllib.request.Request(url, headers=sent, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_readyz_names_each_dependency_and_the_reason(start: Start, readiness: Readiness) -> None:
    def broken() -> str:
        raise TurnstreamError("it is broken")

    listener = start()
    readiness.reached("store")
    readiness.add("servers", lambda: "none is there", is_needed=False)
    assert get(listener, "/readyz")[0] == 200

    readiness.wait_for("weights", "none are loaded")
    readiness.add("folder", broken)
    status, body = get(listener, "/readyz")

    assert status == 503
    assert json.loads(body) == {
        "ready": False,
        "dependencies": {
            "store": {"ready": True, "needed": True, "reason": ""},
            "servers": {"ready": False, "needed": False, "reason": "none is there"},
            "weights": {"ready": False, "needed": True, "reason": "none are loaded"},
            "folder": {"ready": False, "needed": True, "reason": "it is broken"},
        },
    }


def test_checks_run_once_a_second_at_most(start: Start, readiness: Readiness) -> None:
    asked: list[int] = []

    def check() -> str:
        asked.append(1)
        return ""

    listener = start()
    readiness.add("store", check)

    for _ in range(5):
        assert get(listener, "/readyz")[0] == 200

    assert 1 <= len(asked) < 5


def test_metrics_need_the_key_of_the_file(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "service.key"
    listener = start(read_key=lambda: read_key_file(file))
    before = get(listener, "/metrics", x_api_key=KEY)[0]
    file.write_text(f"{KEY}\n")

    assert before == 401, "no key is accepted before the file is there"
    assert get(listener, "/metrics")[0] == 401
    assert get(listener, "/metrics", x_api_key=KEY[:-1])[0] == 401
    assert get(listener, "/metrics", authorization=f"Basic {KEY}")[0] == 401
    assert get(listener, "/metrics", x_api_key=KEY)[0] == 200
    assert get(listener, "/metrics", authorization=f"bearer {KEY}")[0] == 200
    assert get(listener, "/healthz")[0] == get(listener, "/readyz")[0] == 200


def test_only_the_three_paths_can_be_read(start: Start) -> None:
    listener = start()

    assert "process_cpu_seconds_total" in get(listener, "/metrics")[1]
    assert get(listener, "/metrics/")[0] == 404
    assert get(listener, "/")[0] == 404
    assert get(listener, "/metrics", method="POST")[0] == 405


def test_silent_peers_are_disconnected_after_a_while_and_above_their_limit(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = start()
    with contextlib.ExitStack() as stack:
        peers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", listener.port), timeout=10))
            for _ in range(module._MAX_BRIEF + 5)
        ]

        ended = [peer.recv(1) for peer in peers[module._MAX_BRIEF :]]

        assert ended == [b""] * 5
        for peer in peers[: module._MAX_BRIEF]:
            peer.setblocking(False)
            with pytest.raises(BlockingIOError):
                peer.recv(1)
    wait_until(lambda: _status(listener) == 200, describe="an answer")
    monkeypatch.setattr(module, "_BRIEF_S", 0.2)
    with socket.create_connection(("127.0.0.1", listener.port), timeout=10) as peer:
        assert peer.recv(1) == b""


def _status(listener: HttpServer) -> int:
    try:
        return get(listener, "/healthz")[0]
    except OSError:  # no connection is free yet
        return 0


def test_a_taken_port_is_refused_and_a_closed_one_is_free(readiness: Readiness) -> None:
    first = serve_metrics("127.0.0.1", 0, readiness=readiness)
    address = re.escape(f"127.0.0.1:{first.port}")

    with pytest.raises(InvalidConfigError, match=f"^--metrics-listen: {address} cannot be used"):
        serve_metrics("127.0.0.1", first.port, readiness=readiness)
    first.close()
    serve_metrics("127.0.0.1", first.port, readiness=readiness).close()


@pytest.fixture
def process_as_it_was() -> Iterator[None]:
    """Remove what `observe_process` has added to the log and to the metrics."""
    root, before = logging.getLogger(), {*REGISTRY._collector_to_names}
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    for collector in {*REGISTRY._collector_to_names} - before:
        REGISTRY.unregister(collector)


@pytest.mark.usefixtures("process_as_it_was")
@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.7", "some.name"])
def test_an_address_of_other_machines_needs_a_key(host: str) -> None:
    with pytest.raises(InvalidConfigError, match=r"^--metrics-listen: other machines reach"):
        observe_process(Settings(metrics_listen=f"{host}:0"), service="sampler")
