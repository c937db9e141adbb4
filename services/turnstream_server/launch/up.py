"""`turnstream up`: store, batchers, gateway and hosted base models, until Ctrl-C."""

from __future__ import annotations

import shlex
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from turnstream.errors import InvalidConfigError
from turnstream.store.client.connection import connect
from turnstream_server.gateway.config import EngineAddress
from turnstream_server.launch.stack import Stack
from turnstream_server.ledger.core.stores import open_store
from turnstream_server.operations.models import read_bases
from turnstream_server.settings import Settings, mask_password

API_KEY: Final = "tml-local"
"""A key for clients on this machine; the gateway accepts any that begins with `tml-`, unless the
environment names a file with a key."""

_MODELS: Final = "models"
_READY_S: Final = 120.0
_CHECK_S: Final = 0.5


def run_up(
    settings: Settings,
    *,
    folder: Path,
    num_batchers: int,
    console: Console,
    base_models: Sequence[str] = (),
    engines: Sequence[str] = (),
) -> None:
    """Run until interrupted; print where to connect.

    With base models, as for `serve engine`, clients of the Tinker API can train them. The gateway
    passes model calls of agents to the engines.
    """
    for each in engines:
        EngineAddress.parse(each)
    folder = folder.absolute()
    host, first = settings.batcher_host, settings.batcher_port
    ports = [first + number if first else 0 for number in range(num_batchers)]
    if settings.redis_url is None:
        _require_free(settings.store_port, host="127.0.0.1", option="--store-port")
    for port in ports:
        _require_free(port, host=host, option="--port")
    _require_free(settings.http_port, host=settings.http_host, option="--http-port")
    with_data = settings.model_copy(update={"data_dir": settings.data_dir or folder / "store"})
    with (
        open_store(with_data, port=settings.store_port) as url,
        Stack(folder, store_url=url) as stack,
    ):
        # All begin before the first is ready: a start is mostly imports, on a core of its own.
        batchers = [
            stack.start_listening(
                "batcher", f"batcher-{number}", listen=f"{host}:{port}", waits=False
            )
            for number, port in enumerate(ports)
        ]
        listen = f"{settings.http_host}:{settings.http_port}"
        http_url = start_gateway(stack, folder=folder, listen=listen, engines=engines)
        for batcher in batchers:
            stack.wait_for_address(batcher)
        found = [
            f"store    {mask_password(url)}",
            *(f"batcher  {batcher.address}" for batcher in batchers),
            f"gateway  {http_url}",
            f"logs     {folder / 'logs'}",
            f"export TURNSTREAM_REDIS_URL={mask_password(url)}",
        ]
        if base_models:
            host_models(stack, base_models=base_models, folder=folder, store_url=url)
            found += exports(http_url, key_file=None if settings.insecure else settings.key_file)
        console.print("\n".join(found), soft_wrap=True, highlight=False)
        console.print("Ctrl-C stops everything")
        while True:
            stack.check()
            threading.Event().wait(_CHECK_S)


def _require_free(port: int, *, host: str, option: str) -> None:
    """Refuse a port on which a program listens."""
    if not port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InvalidConfigError(
                option,
                f"port {port} of {host} is taken ({error.strerror}): stop the program that listens "
                f"there, or choose another port; `{option} 0` takes a free one",
            ) from error


def start_gateway(stack: Stack, *, folder: Path, listen: str, engines: Sequence[str] = ()) -> str:
    """Start a gateway for the hosted models in a folder, and return its URL."""
    folder /= _MODELS
    named = [f"--engine={each}" for each in engines]
    gateway = stack.start_listening("gateway", "gateway", *named, folder=folder, listen=listen)
    address = gateway.address
    return address if "://" in address else f"http://{address}"


def host_models(stack: Stack, *, base_models: Sequence[str], folder: Path, store_url: str) -> None:
    """Start engine and sampler, and wait until all base models are served.

    `base_models` are those of `serve engine`. The stack has a batcher already.
    """
    models = [f"--base-model={each}" for each in base_models]
    started = [
        stack.start(kind, kind, *models, folder=folder / _MODELS) for kind in ("engine", "sampler")
    ]
    with connect(store_url) as client:
        for _ in stack.watch(timeout_s=_READY_S, every_s=0.2):
            if len(read_bases(client)) >= len(base_models):
                return
            for service in started:
                if service.status is not None:
                    raise service.failure(f"{service.name} ended before it was ready")
    raise started[0].failure(f"no base model is served after {_READY_S:.0f} s")


def exports(url: str, *, key_file: Path | None = None) -> list[str]:
    """Return the lines that point the tinker SDK to a gateway.

    `key_file` has an API key; None for a gateway that needs none.

    >>> exports("http://127.0.0.1:7601")[0]
    'export TINKER_BASE_URL=http://127.0.0.1:7601'
    """
    key = API_KEY if key_file is None else f'"$(cat {shlex.quote(str(key_file))})"'
    return [f"export TINKER_BASE_URL={url}", f"export TINKER_API_KEY={key}"]
