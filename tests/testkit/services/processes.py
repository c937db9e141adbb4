"""Batcher processes, processes that stand still, and processes that begin with torch loaded."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import psutil

from testkit.services.forked import popen
from testkit.waiting import wait_until

FORKING = multiprocessing.get_context("forkserver")
"""Starts processes from one that has imported torch: an import takes seconds of a core."""

FORKING.set_forkserver_preload(["testkit.training.hosted", "testkit.training.ranks"])


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop a process inside the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: is_frozen(pid), 180.0, describe=f"the stop of {pid}")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def is_frozen(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


@contextlib.contextmanager
def batcher_process(url: str, file: Path) -> Iterator[tuple[int, str]]:
    """Start a batcher of the store; yield its process id and its address, kill it at the end."""
    words = ["serve", "batcher", "--redis", url, "--listen", "127.0.0.1:0"]
    words += ["--address-file", str(file)]
    with popen([sys.executable, "-m", "turnstream_server.cli", *words]) as process:
        try:
            wait_until(file.exists, describe="the batcher's address")
            yield process.pid, file.read_text().strip()
        finally:
            process.kill()


CHILD_S: Final = 20
"""Time for the calls of a forked process, which wait for nothing."""


def in_fork(check: Callable[[], Any]) -> str:
    """Run a function in a forked process; return "ok", or its traceback."""
    read, write = os.pipe()
    if not (child := os.fork()):
        signal.alarm(CHILD_S)  # ends a process that hangs
        try:
            check()
            os.write(write, b"ok")
        except BaseException:  # noqa: BLE001 - the test shows it
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as said:
        text = said.read().decode()
    os.waitpid(child, 0)
    return text or "the child has hung"
