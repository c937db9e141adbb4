"""A long wait leaves one warning with its reason, and a short one leaves none."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import turnstream
from testkit import group, wait_until
from turnstream.errors import BatcherUnavailableError, NotReadyError, StoreUnavailableError
from turnstream.generator import Publisher
from turnstream.store.waits import wait_warnings
from turnstream.worker import BatchStream
from turnstream_server.embedded import free_port

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


@pytest.fixture(autouse=True)
def warn_early(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(wait_warnings, "FIRST_S", 0.1)
    monkeypatch.setattr(wait_warnings, "EVERY_S", 1000.0)
    caplog.set_level(logging.WARNING)


@pytest.fixture
def run(server: Any) -> Any:
    with turnstream.connect(server.url) as service:
        yield service.create_run("waits", batch_groups=1, max_staleness=0, max_planned_ahead=0)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


def test_publisher_warns_once_of_a_group_without_admission(
    run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = run.publisher(admission_timeout_s=600.0)
    publisher.publish(group("g0")).result(30)
    for name in ("g1", "g2"):
        publisher.publish(group(name))
    wait_until(lambda: warnings(caplog), describe="a warning")
    with pytest.raises(NotReadyError):
        publisher.close(1.0)

    [warning] = [each for each in warnings(caplog) if "for admission" in each]
    assert warning.startswith("run waits: group g1 has waited")
    assert "1 groups are live, 1 are allowed after step 0" in warning


def test_publisher_warns_of_a_wrong_store_address(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    publisher = Publisher(f"redis://127.0.0.1:{port}", "run", timeout_s=600.0)
    threading.Thread(target=publish_and_fail, args=(publisher,), daemon=True).start()

    words = f"the store at 127.0.0.1:{port} has taken nothing"
    wait_until(lambda: any(words in each for each in warnings(caplog)), describe="a warning")

    with pytest.raises(NotReadyError):
        publisher.close(0.1)


def publish_and_fail(publisher: Publisher) -> None:
    with pytest.raises(StoreUnavailableError):
        publisher.publish(group("g0")).result()


def test_stream_without_data_warns_with_the_batchers_reason(
    run: Any,
    start_batcher: Callable[[], Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wait_warnings, "EVERY_S", 0.5)  # the first may precede the reason
    start_batcher()
    with run.batches() as batches, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(next, batches)
        try:
            warning, *_ = wait_until(
                lambda: [each for each in warnings(caplog) if "0 of 1 groups ready" in each],
                timeout_s=10.0,  # a Get waits for 15 s
                describe="the batcher's reason",
            )
        finally:
            with run.publisher() as publisher:
                publisher.publish(group("g0")).result(30)
            waiting.result()

    assert warning.startswith("step 1 of run 'waits' did not come within")


def test_stream_warns_of_an_address_without_a_batcher(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()

    with pytest.raises(BatcherUnavailableError):
        BatchStream(f"127.0.0.1:{port}", "run", timeout_s=3.0)

    [warning] = warnings(caplog)
    assert "the beginning of a trainer session is not acknowledged" in warning
    assert f"127.0.0.1:{port}" in warning
