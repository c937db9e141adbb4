"""Stores, proxies, deadlines and clocks of the generator tests."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

import pytest
import redis

from harness.proxy import Proxy
from testkit.services.stores import Store
from turnstream.generator.outbox import heartbeats, waits
from turnstream.generator.transport import sender
from turnstream.store.waits import bounded_call
from turnstream_server.embedded import EmbeddedServer

LONG_S: Final = 30.0
"""Time for every operation of a test, also on a busy machine."""


@pytest.fixture
def store(server: EmbeddedServer, client: redis.Redis, new_run: Callable[..., str]) -> Store:
    """The shared store."""
    return Store(server, client, new_run)


@pytest.fixture
def own_store(
    own_server: EmbeddedServer, own_client: redis.Redis, new_run: Callable[..., str]
) -> Store:
    """A store of this test alone, which may be killed."""
    return Store(own_server, own_client, new_run)


@pytest.fixture
def proxy_to() -> Iterator[Callable[[str], Proxy]]:
    """`proxy_to(url)` starts a proxy."""
    with contextlib.ExitStack() as stack:
        yield lambda url: stack.enter_context(Proxy(url))


@pytest.fixture(autouse=True)
def wait_for_answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`wait_for_answers(seconds)` sets how long a wait outlasts its deadline for a sent request.

    A store on a busy machine answers late. Tests of a silent store set the product's value.
    """

    def wait(seconds: float) -> None:
        for module in (waits, sender, bounded_call):
            monkeypatch.setattr(module, "ANSWER_S", seconds)

    wait(LONG_S)
    return wait


class Clock:
    """The time of publishers, which stands still until `resume`."""

    def __init__(self) -> None:
        self._stopped_s = time.monotonic()
        self._behind_s: float | None = None

    def monotonic(self) -> float:
        """Seconds, as of `time.monotonic`."""
        if self._behind_s is None:
            return self._stopped_s
        return time.monotonic() - self._behind_s

    def resume(self, *, ahead_s: float = 0.0) -> None:
        """Run from now on, after a jump of `ahead_s`."""
        self._behind_s = time.monotonic() - self._stopped_s - ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of every publisher that the test makes stands still."""
    clock = Clock()
    monkeypatch.setattr(sender, "time", clock)
    return clock


@pytest.fixture
def without_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """No heartbeat is sent with the counted calls."""
    monkeypatch.setattr(heartbeats, "_FIRST_INTERVAL_S", LONG_S)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Publishers end their threads. Threads that another test has left are not counted."""
    before = {*threading.enumerate()}
    yield
    left = {*threading.enumerate()} - before
    assert [each.name for each in left if each.name.startswith("turnstream")] == []
