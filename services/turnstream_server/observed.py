"""Observation of a service process: its log, metrics, health and traces."""

from __future__ import annotations

import contextlib
import logging
from typing import Final

from turnstream.calls import connect_calls
from turnstream.errors import InvalidConfigError
from turnstream.store.client.api_keys import FILE_VARIABLE, read_key_file
from turnstream.store.run.batchers import registered_batchers
from turnstream.worker.launch import find_launch
from turnstream_server.keys.store import is_loopback
from turnstream_server.logs import configure_logging
from turnstream_server.options import split_address
from turnstream_server.settings import Settings
from turnstream_server.telemetry.instruments import REGISTRY, LogCounts
from turnstream_server.telemetry.readiness import Check, Readiness
from turnstream_server.telemetry.tracing import start_tracing
from turnstream_server.tls import read_tls

_DEFAULT_HOST: Final = "127.0.0.1"


def observe_process(
    settings: Settings,
    *,
    service: str,
    name: str = "",
    listen: str = "",
    is_insecure: bool = False,
) -> Readiness:
    """Return the readiness of this process; its log, metrics and traces begin.

    Args:
        settings: those of the environment.
        service: kind of the service.
        name: its name in the log; "" for its kind.
        listen: "host:port" or "port" for metrics and health; "" for that of the settings. The first
            of several ranks listens.
        is_insecure: /metrics needs no key, on every address.

    Raises:
        InvalidConfigError: the address cannot be used, or other machines reach it without a key.
        MissingExtraError: a collector of traces is set, and OpenTelemetry is not installed.
    """
    configure_logging(settings.log_level, service=name or service, form=settings.log_format)
    start_tracing(service)
    readiness = Readiness(service)
    logging.getLogger().addHandler(LogCounts(service=service))
    REGISTRY.register(readiness)
    address = listen or settings.metrics_listen
    if address and find_launch().dp_rank == 0:
        _listen(settings, address, readiness=readiness, is_insecure=is_insecure)
    return readiness


def _listen(settings: Settings, address: str, *, readiness: Readiness, is_insecure: bool) -> None:
    # A process without a listener needs no web framework.
    from turnstream_server.listener import OPTION, serve_metrics

    host, port = split_address(address, option=OPTION, default_host=_DEFAULT_HOST)
    key_file = settings.key_file
    if key_file is None and not (is_insecure or settings.insecure or is_loopback(host)):
        raise InvalidConfigError(
            OPTION,
            f"other machines reach {host!r}, and there is no API key: name a file for one in "
            f"{FILE_VARIABLE}, or accept requests without a key with TURNSTREAM_INSECURE=1",
        )
    read_key = None
    if key_file is not None:
        read_key = lambda: read_key_file(key_file)  # noqa: E731 - it may be written later
    tls = read_tls(settings.tls_cert, settings.tls_key)
    serve_metrics(host, port, readiness=readiness, read_key=read_key, tls=tls)


def run_check(url: str, run: str) -> Check:
    """Return a check that a run exists."""

    def check() -> str:
        with contextlib.closing(connect_calls(url)) as calls:
            calls.find_run(run)
        return ""

    return check


def batcher_check(url: str) -> Check:
    """Return a check that a batcher is registered in the store."""
    find = registered_batchers(url)

    def check() -> str:
        find()
        return ""

    return check
