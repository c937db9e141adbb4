"""`turnstream up`: the store and its batchers, until somebody says stop."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from turnstream.errors import InvalidConfigError, TurnstreamError
from turnstream.store.client.connection import connect
from turnstream.store.client.replies import translating
from turnstream_server.bus.core.stores import open_store
from turnstream_server.jobs.services import start_batcher, store_environment
from turnstream_server.jobs.stack import Stack
from turnstream_server.settings import Settings, mask_password

_CHECK_S = 0.5


def run_up(settings: Settings, *, folder: Path, num_batchers: int, console: Console) -> None:
    """Run until interrupted; print where to connect.

    If another `up` runs on the same folder, print its addresses and return.
    """
    folder = folder.absolute()
    addresses = folder / "addresses"
    if lines := _lines_of_another(addresses):
        console.print(f"already running on {folder}\n{lines}", soft_wrap=True, highlight=False)
        return
    listen = [_listen(settings, number) for number in range(num_batchers)]
    if settings.redis_url is None:
        _require_free(settings.store_port, host="127.0.0.1", option="--store-port")
    for address in listen:
        host, _, port = address.rpartition(":")
        _require_free(int(port), host=host, option="--port")
    with_data = settings.model_copy(update={"data_dir": settings.data_dir or folder / "store"})
    with (
        open_store(with_data, port=settings.store_port) as url,
        Stack(folder, store_environment(url)) as stack,
    ):
        found = [f"store    {mask_password(url)}"]
        for number, address in enumerate(listen):
            batcher = start_batcher(stack, name=f"batcher-{number}", listen=address)
            found.append(f"batcher  {batcher.address}")
        found += [
            f"logs     {folder / 'logs'}",
            f"export TURNSTREAM_REDIS_URL={mask_password(url)}",
        ]
        with _kept(addresses, "\n".join(found)):
            console.print("\n".join(found), soft_wrap=True, highlight=False)
            console.print("Ctrl-C stops everything")
            while True:
                stack.check()
                threading.Event().wait(_CHECK_S)


def _listen(settings: Settings, number: int) -> str:
    """Return the address of one of the batchers; their ports follow each other."""
    port = settings.batcher_port + number if settings.batcher_port else 0
    return f"{settings.batcher_host}:{port}"


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


@contextlib.contextmanager
def _kept(path: Path, text: str) -> Iterator[None]:
    """Keep this text in the file for another `up` on the same folder."""
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _lines_of_another(path: Path) -> str:
    """Return the text of the `up` that runs on the same folder; "" if none runs."""
    try:
        lines = path.read_text(encoding="utf-8")
        with connect(lines.split()[1], num_retries=0, silent_s=2.0) as client, translating():
            client.ping()
    except (OSError, IndexError, ValueError, TurnstreamError):
        return ""
    return lines
