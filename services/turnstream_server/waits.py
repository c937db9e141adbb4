"""Addresses of the store, and waits until what a process needs at its start is there.

Commands that read a store import this module, and not the services.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from turnstream.errors import RunNotFoundError, UnavailableError
from turnstream.store.client.addresses import DEFAULT_URL, URL_VARIABLE, checked_url, is_http
from turnstream.store.client.api_keys import FILE_VARIABLE
from turnstream.store.waits.wait_warnings import WaitWarnings
from turnstream_server.ledger.core.stores import check_store
from turnstream_server.settings import Settings, checked_store_url

if TYPE_CHECKING:
    from turnstream.calls import Calls

_logger = logging.getLogger(__name__)

_RETRY_S: Final = 0.5
"""Seconds between two attempts; connecting to a store that is away takes as long again."""

_Result = TypeVar("_Result")


def store_url(settings: Settings, given: str = "") -> str:
    """Return the address of a store that runs already; InvalidConfigError for another address.

    `given` is the option `--redis`, and replaces the settings. The default is that of
    `turnstream up`.
    """
    url, field = _given_url(settings, given)
    url = checked_store_url(url, field=field)
    # The first start of a store may write the file of the password.
    return _repeat(lambda: settings.with_password(url), timeout_s=settings.start_wait_s)


def generator_url(settings: Settings, given: str) -> str:
    """Return the address of a store, or of its gateway, which is enough for a generator.

    Arguments and errors are those of `store_url`.
    """
    url, field = _given_url(settings, given)
    if not is_http(url):
        return store_url(settings, given)
    wait_for_own_key(settings)
    return checked_url(url, field=field)


def _given_url(settings: Settings, given: str) -> tuple[str, str]:
    """Return the address of the option or the environment, and the name of its setting."""
    if given:
        return given, "--redis"
    if settings.redis_url is not None:
        return settings.redis_url.get_secret_value(), URL_VARIABLE
    return DEFAULT_URL, URL_VARIABLE


def wait_for_own_key(settings: Settings) -> None:
    """Return once the file of the own key exists, if one is set: a batcher or gateway makes it."""
    path = settings.key_file
    if path is None or settings.api_key is not None:
        return

    def find() -> None:
        if not path.is_file():
            raise UnavailableError(f"{FILE_VARIABLE}: {path} does not exist yet")

    _repeat(find, timeout_s=settings.start_wait_s)


def wait_for_store(url: str, *, durability: str, timeout_s: float) -> None:
    """Return as soon as the store answers; InvalidConfigError if it would lose data."""
    _repeat(lambda: check_store(url, durability=durability), timeout_s=timeout_s)


def wait_for_run(url: str, run: str, *, timeout_s: float) -> None:
    """Return as soon as the run exists."""
    _retry(url, lambda calls: calls.find_run(run), timeout_s=timeout_s)


def wait_for_batcher(url: str, *, timeout_s: float) -> str:
    """Return the addresses of the registered batchers, with commas between them."""
    return _retry(url, lambda calls: ",".join(calls.batchers()()), timeout_s=timeout_s)


def _retry(url: str, attempt: Callable[[Calls], _Result], *, timeout_s: float) -> _Result:
    """Repeat an attempt at a store, or a gateway, while something is away."""
    # Here and not above: a command that reads a store needs no calls.
    from turnstream.calls import connect_calls

    def connected() -> _Result:
        with contextlib.closing(connect_calls(url)) as calls:
            return attempt(calls)

    return _repeat(connected, timeout_s=timeout_s)


def _repeat(attempt: Callable[[], _Result], *, timeout_s: float) -> _Result:
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
        time.sleep(_RETRY_S)
