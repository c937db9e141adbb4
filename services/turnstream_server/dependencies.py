"""The services that another service needs at its start: store, run and batcher, in any order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, TypeVar

from turnstream.errors import RunNotFoundError, UnavailableError
from turnstream.store.client.connection import connect
from turnstream.store.client.replies import translating
from turnstream.store.client.run_ids import find_run
from turnstream.store.run.batchers import wait_for_batchers
from turnstream.store.run.configs import read_config
from turnstream.store.waits.wait_warnings import WaitWarnings

_logger = logging.getLogger(__name__)

AGAIN_S: Final = 0.5
"""Seconds between two attempts; connecting to a store that is away takes as long again."""

_Result = TypeVar("_Result")


def wait_for_store(url: str, *, timeout_s: float) -> None:
    """Return as soon as the store answers."""

    def ping() -> None:
        with connect(url, num_retries=0) as client, translating():
            client.ping()

    _retry(ping, timeout_s=timeout_s)


def wait_for_run(url: str, run: str, *, timeout_s: float) -> None:
    """Return as soon as the run exists."""

    def find() -> None:
        with connect(url, num_retries=0) as client:
            read_config(client, find_run(client, run))

    _retry(find, timeout_s=timeout_s)


def wait_for_batcher(url: str, *, timeout_s: float) -> str:
    """Return the addresses of the registered batchers, with commas between them."""

    def find() -> str:
        with connect(url, num_retries=0) as client:
            return ",".join(wait_for_batchers(client, timeout_s=0))

    return _retry(find, timeout_s=timeout_s)


def _retry(attempt: Callable[[], _Result], *, timeout_s: float) -> _Result:
    """Repeat an attempt while something is away; warn after 5 s, then every 30 s."""
    began_s, warnings = time.monotonic(), WaitWarnings()
    while True:
        try:
            return attempt()
        except (UnavailableError, RunNotFoundError) as error:
            waited_s = time.monotonic() - began_s
            if waited_s >= timeout_s:
                raise
            if warnings.is_due(waited_s):
                _logger.warning("waiting for %.0f s: %s", waited_s, error)
        time.sleep(AGAIN_S)
