"""Readiness of a service: its dependencies, their checks, and the state and reason of each."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from turnstream.calls import connect_calls
from turnstream.errors import TurnstreamError
from turnstream.store.client.addresses import is_http
from turnstream.store.client.connection import connect
from turnstream.store.client.replies import translating
from turnstream.store.client.server_checks import SYNCS_OF

Check = Callable[[], str]
"""Returns why a dependency is not ready, "" if it is. An error is a reason, too."""

_FRESH_S: Final = 1.0
"""Requests within this time have one answer: everyone may ask, and a check may ask the store."""


class Dependency(NamedTuple):
    """State of a dependency.

    Attributes:
        reason: why it is not ready; "" if it is.
        is_needed: the service is not ready without it.
    """

    reason: str
    is_needed: bool = True


class Readiness(Collector):
    """The dependencies of one service process; safe to use from several threads.

    Args:
        service: name of the service in the metric.
    """

    def __init__(self, service: str) -> None:
        self._service = service
        self._checks: dict[str, tuple[Check, bool]] = {}
        self._lock = threading.Lock()
        self._read_s = -_FRESH_S
        self._known: dict[str, Dependency] = {}

    def add(self, name: str, check: Check, *, is_needed: bool = True) -> None:
        """Check a dependency at each request. The check must return within some seconds."""
        self._checks = {**self._checks, name: (check, is_needed)}
        self._read_s = -_FRESH_S

    def wait_for(self, name: str, reason: str) -> None:
        """Count a dependency as not ready, until it is added or `reached`."""
        self.add(name, lambda: reason)

    def reached(self, name: str) -> None:
        """Count a dependency as ready from now on."""
        self.add(name, lambda: "")

    def dependencies(self) -> dict[str, Dependency]:
        """Return the state of every dependency, one second old at most."""
        with self._lock:
            if time.monotonic() - self._read_s >= _FRESH_S:
                checks, self._read_s = self._checks, time.monotonic()
                self._known = {
                    name: Dependency(_reason(check), is_needed)
                    for name, (check, is_needed) in checks.items()
                }
            return self._known

    def answer(self) -> tuple[int, bytes]:
        """Return status and body of /readyz: 503 if a needed dependency is not ready."""
        found = self.dependencies()
        is_ready = not any(each.reason and each.is_needed for each in found.values())
        shown = {
            name: {"ready": not each.reason, "needed": each.is_needed, "reason": each.reason}
            for name, each in found.items()
        }
        body = json.dumps({"ready": is_ready, "dependencies": shown}, indent=2) + "\n"
        return 200 if is_ready else 503, body.encode()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metric of the dependencies."""
        shown = GaugeMetricFamily(
            f"turnstream_{self._service}_dependency_ready",
            "1 if a dependency of /readyz is ready, 0 if not.",
            labels=["dependency"],
        )
        for name, each in self.dependencies().items():
            shown.add_metric([name], float(not each.reason))
        yield shown


def _reason(check: Check) -> str:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - whatever fails is the reason
        return str(error) or repr(error)


_ANSWER_S: Final = 2.0


def store_check(url: str, *, durability: str) -> Check:
    """Return a check that a store, or a gateway, answers and has this durability."""
    syncs = SYNCS_OF[durability]

    def check() -> str:
        # A connection for each check: an idle one would cost more between two of them.
        try:
            if is_http(url):  # the gateway checks its store itself
                with contextlib.closing(connect_calls(url)) as calls:
                    calls.ping()
                return ""
            with (
                connect(url, num_retries=0, silent_s=_ANSWER_S, syncs=syncs) as client,
                translating(),
            ):
                client.ping()
        except TurnstreamError as error:
            return str(error)
        return ""

    return check


def folder_check(folder: Path, *, is_written: bool) -> Check:
    """Return a check that a folder is there, and can be written if `is_written`."""

    def check() -> str:
        if not folder.is_dir():
            return f"there is no folder {folder}"
        if not os.access(folder, os.W_OK if is_written else os.R_OK | os.X_OK):
            return f"{folder} cannot be {'written' if is_written else 'read'}"
        return ""

    return check
