"""`turnstream up`: the store and its batchers, until somebody says stop."""

from __future__ import annotations

import threading
from pathlib import Path

from rich.console import Console

from turnstream_server.bus.stores import open_store
from turnstream_server.jobs.services import start_batcher, store_environment
from turnstream_server.jobs.stack import Stack
from turnstream_server.settings import Settings, mask_password

_CHECK_S = 0.5


def run_up(settings: Settings, *, folder: Path, num_batchers: int, console: Console) -> None:
    """Run until interrupted; prints where to connect.

    Raises:
        TurnstreamError: the store or a batcher did not start, or ended.
        KeyboardInterrupt: the way it ends.
    """
    folder = folder.absolute()
    with_data = settings.model_copy(update={"data_dir": settings.data_dir or folder / "store"})
    with open_store(with_data) as url, Stack(folder, store_environment(url)) as stack:
        console.print(f"store    {mask_password(url)}", soft_wrap=True)
        for number in range(num_batchers):
            port = settings.batcher_port + number if settings.batcher_port else 0
            listen = f"{settings.batcher_host}:{port}"
            batcher = start_batcher(stack, name=f"batcher-{number}", listen=listen)
            console.print(f"batcher  {batcher.address}", soft_wrap=True)
        console.print(f"logs     {folder / 'logs'}\nCtrl-C stops everything", soft_wrap=True)
        while True:
            stack.check()
            threading.Event().wait(_CHECK_S)
