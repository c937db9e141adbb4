"""The first call: `turnstream.connect()` opens the store, and the store leads to runs."""

from __future__ import annotations

import dataclasses
import difflib
import os
from typing import Any, Final, Self

from turnstream.batching.config import BatchingConfig
from turnstream.errors import InvalidConfigError, StoreUnavailableError
from turnstream.run import Run
from turnstream.store.client.connection import address_of, checked_url
from turnstream.store.client.connection import connect as connect_to_store
from turnstream.store.client.replies import translating
from turnstream.store.client.run_ids import find_run
from turnstream.store.run import runs
from turnstream.store.run.configs import read_config

DEFAULT_URL: Final = "redis://127.0.0.1:7379"
"""Where `turnstream up` keeps its store."""

URL_VARIABLE: Final = "TURNSTREAM_REDIS_URL"

_SETTINGS: Final = tuple(field.name for field in dataclasses.fields(BatchingConfig))


def connect(url: str | None = None) -> Service:
    """Open the store of a Turnstream service.

    Args:
        url: `redis://host:port`, `rediss://` or `unix://` address of the store. None takes the
            environment variable TURNSTREAM_REDIS_URL, else redis://127.0.0.1:7379.

    Raises:
        InvalidConfigError: the address has another form.
        StoreUnavailableError: no store answers at the address.
    """
    service = Service(url or os.environ.get(URL_VARIABLE) or DEFAULT_URL)
    try:
        service.ping()
    except BaseException:
        service.close()
        raise
    return service


class Service:
    """The store at `url`, with its runs; a context manager. `turnstream.connect` makes it."""

    def __init__(self, url: str) -> None:
        self.url = checked_url(url)
        self._client = connect_to_store(url)

    def ping(self) -> None:
        """Check that the store answers; the error names its address, and how to start one."""
        try:
            with translating():
                self._client.ping()
        except StoreUnavailableError as error:
            raise StoreUnavailableError(
                f"no store answers at {address_of(self.url)}: {error.message}. Start one with "
                f"`turnstream up`, or set {URL_VARIABLE}=redis://host:port",
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
        runs.create_run(self._client, name, _config(config, settings))
        return self.run(name)

    def run(self, name: str) -> Run:
        """Open the run that has this name now, or raise RunNotFoundError."""
        run_id = find_run(self._client, name)
        read_config(self._client, run_id)
        return Run(self._client, self.url, run_id)

    def runs(self) -> list[str]:
        """Return the names of all runs, sorted."""
        return sorted({run.name for run in runs.list_runs(self._client)})

    def close(self) -> None:
        """Disconnect. Publishers and batches of its runs stay open. Safe to call twice."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Service({address_of(self.url)!r})"


def _config(config: BatchingConfig | None, settings: dict[str, Any]) -> BatchingConfig:
    """Return a config from its fields; refuse unknown fields, and two forms at once."""
    if config is not None:
        if settings:
            raise InvalidConfigError(
                next(iter(settings)), "settings are in `config` and in arguments; use one of them"
            )
        return config
    for name in settings:
        if name not in _SETTINGS:
            near = difflib.get_close_matches(name, _SETTINGS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InvalidConfigError(name, f"it is no setting of a run{hint}")
    if "batch_groups" not in settings:
        raise InvalidConfigError("batch_groups", "it is missing: the groups of one training step")
    return BatchingConfig(**{"mini_batch_groups": settings["batch_groups"], **settings})
