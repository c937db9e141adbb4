"""Services wait for their dependencies at their start, and say for which."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest
import redis

from testkit import config
from turnstream.errors import (
    BatcherUnavailableError,
    RunNotFoundError,
    StoreUnavailableError,
)
from turnstream.store.client.scripts import run_command
from turnstream.store.run.batchers import register_command
from turnstream.store.run.runs import create_run
from turnstream_server import waits
from turnstream_server.embedded import EmbeddedServer, free_port
from turnstream_server.ledger.core import stores

pytestmark = pytest.mark.redis


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "_RETRY_S", 0.05)
    monkeypatch.setattr("turnstream.store.waits.wait_warnings.FIRST_S", 0.1)


def later(act: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(0.4, act)
    timer.start()
    return timer


def test_wait_for_run_ends_with_the_run_or_an_error_that_names_it(
    server: EmbeddedServer, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    timer = later(lambda: create_run(client, "late run", config()))

    waits.wait_for_run(server.url, "late run", timeout_s=30)

    timer.join()
    assert "no run named 'late run'" in caplog.text
    with pytest.raises(RunNotFoundError, match="'never'"):
        waits.wait_for_run(server.url, "never", timeout_s=0.2)


def test_wait_for_batcher_returns_all_registered_addresses(
    server: EmbeddedServer, client: redis.Redis
) -> None:
    timer = later(lambda: run_command(client, register_command("one:7600")))

    found = waits.wait_for_batcher(server.url, timeout_s=30)

    timer.join()
    run_command(client, register_command("one:7600", lease_s=0))
    assert found == "one:7600"
    with pytest.raises(BatcherUnavailableError, match="no batcher is registered"):
        waits.wait_for_batcher(server.url, timeout_s=0.2)


def test_wait_for_store_names_the_store_that_is_away(caplog: pytest.LogCaptureFixture) -> None:
    began_s = time.monotonic()

    with pytest.raises(StoreUnavailableError, match="cannot be reached"):
        waits.wait_for_store("redis://127.0.0.1:1", durability="everysec", timeout_s=0.5)

    assert time.monotonic() - began_s >= 0.5
    assert "waiting for" in caplog.text


def test_wait_for_store_reports_one_that_never_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stores, "_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"

        with pytest.raises(StoreUnavailableError, match="has not answered in time"):
            waits.wait_for_store(url, durability="everysec", timeout_s=0.5)

    assert "has not answered in time" in caplog.text


def test_wait_for_store_returns_when_the_store_starts() -> None:
    url = f"redis://127.0.0.1:{(port := free_port())}"
    server = EmbeddedServer(port=port)
    began_s = time.monotonic()
    timer = later(server.start)

    waits.wait_for_store(url, durability="everysec", timeout_s=30)
    waited_s = time.monotonic() - began_s

    try:
        assert waited_s >= timer.interval
        with redis.Redis.from_url(url) as client:
            assert client.ping()
    finally:
        timer.join()
        server.stop()
