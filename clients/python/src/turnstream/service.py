"""The first call: `turnstream.connect()` opens the store, and the store leads to runs."""

from __future__ import annotations

import os
from typing import Any, Self

from turnstream.batching.config import BatchingConfig
from turnstream.batching.config.from_settings import config_from_settings
from turnstream.calls import connect_calls
from turnstream.errors import InvalidConfigError, StoreUnavailableError
from turnstream.run import Run
from turnstream.store.client.addresses import (
    DEFAULT_URL,
    URL_VARIABLE,
    address_of,
    checked_url,
    is_http,
    parse_http,
    with_key,
    without_key,
)
from turnstream.store.client.api_keys import own_key
from turnstream.store.client.passwords import with_own_password
from turnstream.types.names import RunId


def connect(url: str | None = None, *, api_key: str | None = None) -> Service:
    """Open the store of a Turnstream service, or its gateway, which leads to the same runs.

    Args:
        url: `redis://host:port`, `rediss://` or `unix://` address of the store, or `http://host:port`
            or `https://` address of a gateway, which needs the extra `http`:
            `pip install "turnstream[http]"`. None takes the environment variable
            TURNSTREAM_REDIS_URL, else redis://127.0.0.1:7379. A store without a password in its
            URL gets that of the file TURNSTREAM_REDIS_PASSWORD_FILE.
        api_key: key for the gateway, and for the batchers that `Run.batches` calls. None takes that
            of TURNSTREAM_API_KEY, else of the file TURNSTREAM_KEY_FILE.

    Raises:
        InvalidConfigError: the address has another form, or the key cannot be read.
        MissingExtraError: the package for HTTP is not installed.
        StoreUnavailableError: no store answers at the address.
        AccessDeniedError: the gateway does not accept the key.
    """
    url = with_own_password(url or os.environ.get(URL_VARIABLE) or DEFAULT_URL)
    service = Service(url, api_key=api_key)
    try:
        service.ping()
    except BaseException:
        service.close()
        raise
    return service


class Service:
    """The store at `url`, with its runs; a context manager. `turnstream.connect` makes it.

    A service and a run can be pickled, for Ray or another process. They connect there at their
    first call, to the same address. The pickle holds the password of the URL and the API key.

    Attributes:
        url: address of the store or the gateway, without the key of a gateway.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = self._own_url = checked_url(url)
        self._api_key = None if api_key is None else own_key(api_key)
        if is_http(url):
            self.url = without_key(url)
            if self._api_key is not None:
                self._own_url = with_key(url, self._api_key)
            self._api_key = parse_http(self._own_url).api_key or None
        self._calls = connect_calls(self._own_url)

    def ping(self) -> None:
        """Check that the store answers; the error names its address, and how to start one."""
        try:
            self._calls.ping()
        except StoreUnavailableError as error:
            what, command = "store", "turnstream up"
            if is_http(self.url):
                what, command = "gateway", "turnstream serve gateway"
            raise StoreUnavailableError(
                f"no {what} answers at {address_of(self.url)}: {error.message.rstrip('.')}. "
                f"Start one with `{command}`, or set {URL_VARIABLE}=redis://host:port",
                error.reasons,
                error.retry_after_s,
            ) from error

    def create_run(self, name: str, config: BatchingConfig | None = None, **settings: Any) -> Run:
        """Create a run, or open the run of this name if it has the same settings.

        Args:
            name: name of the run.
            config: all settings as one value; None builds it from `settings`.
            **settings: the fields of `BatchingConfig`, such as `batch_groups=8`. An update takes
                all groups of a step unless `mini_batch_groups` is given.

        Raises:
            InvalidConfigError: names the setting that is unknown or cannot have this value.
            ConflictError: the run exists with other settings.
        """
        return self._run(self._calls.create_run(name, _config(config, settings)))

    def run(self, name: str) -> Run:
        """Open the run that has this name now, or raise RunNotFoundError."""
        return self._run(self._calls.find_run(name))

    def runs(self) -> list[str]:
        """Return the names of all runs, sorted."""
        return sorted({run.name for run in self._calls.list_runs()})

    def close(self) -> None:
        """Disconnect. Publishers and batches of its runs stay open. Safe to call twice."""
        self._calls.close()

    def _run(self, run_id: RunId) -> Run:
        return Run(self._calls, self._own_url, run_id, api_key=self._api_key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _service, (self._own_url, self._api_key)

    def __repr__(self) -> str:
        return f"Service({address_of(self.url)!r})"


def _service(url: str, api_key: str | None) -> Service:
    """Return an unpickled service."""
    return Service(url, api_key=api_key)


def _config(config: BatchingConfig | None, settings: dict[str, Any]) -> BatchingConfig:
    """Return a config from its fields; refuse unknown fields, and two forms at once."""
    if config is not None:
        if settings:
            raise InvalidConfigError(
                next(iter(settings)), "settings are in `config` and in arguments; use one of them"
            )
        return config
    return config_from_settings(settings)
