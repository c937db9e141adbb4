"""Services on a store that loses what it acknowledges: refused at the start, and after a change."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis

import turnstream
from testkit import config
from testkit.services.batchers import BatcherThread
from testkit.services.gateway_thread import GatewayThread
from testkit.waiting import wait_until
from turnstream.errors import UnsafeStoreError
from turnstream_server.embedded import EmbeddedServer, free_port
from turnstream_server.telemetry.readiness import Readiness

pytestmark = pytest.mark.redis

REFUSED = "appendonly: the store at .* has 'no'; needed is 'yes'"


class LosingServer(EmbeddedServer):
    """A store without an append-only file."""

    def _command(self) -> list[str]:
        words = super()._command()
        words[words.index("--appendonly") + 1] = "no"
        return words


@pytest.fixture
def losing() -> Iterator[LosingServer]:
    with LosingServer() as server:
        yield server


@pytest.mark.parametrize("service", ["batcher", "gateway"])
def test_service_refuses_to_start_on_an_unsafe_store(losing: LosingServer, service: str) -> None:
    words = ["-m", "turnstream_server", "serve", service, "--redis", losing.url]

    ended = subprocess.run(
        [sys.executable, *words, "--listen", "127.0.0.1:0"],
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert ended.returncode == 1
    assert "has 'no'; needed is 'yes'" in ended.stderr


def test_run_is_not_created_on_an_unsafe_store(losing: LosingServer) -> None:
    with pytest.raises(UnsafeStoreError, match=REFUSED):
        turnstream.connect(losing.url).create_run("r", config())

    assert redis.Redis.from_url(losing.url).dbsize() == 0


def test_reconnect_to_an_unsafe_store_is_refused_and_reported(tmp_path: Path) -> None:
    port = free_port()
    url = f"redis://127.0.0.1:{port}"
    readiness = Readiness("gateway"), Readiness("batcher")

    def reasons() -> list[str]:
        return [each.dependencies()["store"].reason for each in readiness]

    server = EmbeddedServer(tmp_path, port=port)
    server.start()
    with (
        GatewayThread(url, readiness=readiness[0]) as gateway,
        BatcherThread(url, readiness=readiness[1]),
    ):
        assert reasons() == ["", ""]
        server.stop()
        with LosingServer(port=port):
            wait_until(lambda: all("needed is 'yes'" in each for each in reasons()))
            body = {"name": "r", "settings": {"batch_groups": 1}}
            answer = httpx.post(f"{gateway.base_url}/v1/runs", json=body)
            assert (answer.status_code, answer.json()["field"]) == (503, "appendonly")
            assert redis.Redis.from_url(url).dbsize() == 0
        server.start()
        wait_until(lambda: reasons() == ["", ""])
    server.stop()
