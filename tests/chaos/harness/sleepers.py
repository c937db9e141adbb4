"""Processes that are stopped for a while, and know nothing of it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from harness.rig import PATIENCE_S
from testkit import wait_until


@contextlib.contextmanager
def asleep(pid: int) -> Iterator[None]:
    """The process sleeps for as long as the block lasts."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: is_asleep(pid), timeout_s=PATIENCE_S, describe=f"the sleep of {pid}")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def is_asleep(pid: int) -> bool:
    """Whether the process was stopped by a signal."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return text.rpartition(")")[2].split()[0] == "T"
