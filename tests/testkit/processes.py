"""Batcher processes, processes that stand still, and processes that begin with torch loaded."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from testkit.waiting import wait_until

FORKING = multiprocessing.get_context("forkserver")
"""Starts processes from one that has imported torch: an import takes seconds of a core."""

FORKING.set_forkserver_preload(["testkit.hosted", "testkit.ranks"])


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop a process inside the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def batcher_process(url: str, file: Path) -> Iterator[tuple[int, str]]:
    """Start a batcher of the store; yield its process id and its address, kill it at the end."""
    words = ["serve", "batcher", "--redis", url, "--listen", "127.0.0.1:0"]
    words += ["--address-file", str(file)]
    with subprocess.Popen([sys.executable, "-m", "turnstream_server.cli", *words]) as process:
        try:
            wait_until(file.exists, describe="the batcher's address")
            yield process.pid, file.read_text().strip()
        finally:
            process.kill()
