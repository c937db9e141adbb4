"""A gateway in a process of its own, and the CPU time and memory of processes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

import psutil

from testkit.waiting import wait_until


class Cost(NamedTuple):
    """CPU seconds of a process and its children, and the growth of their memory in MiB."""

    cpu_s: float
    memory_mb: float


class GatewayProcess:
    """A gateway process on the store at `url`; `file` receives its address."""

    def __init__(self, url: str, file: Path, *options: str) -> None:
        words = ["serve", "gateway", "--redis", url, "--listen", "127.0.0.1:0"]
        words += ["--address-file", str(file), *options]
        self._process = subprocess.Popen([sys.executable, "-m", "turnstream_server.cli", *words])
        self._file = file

    def __enter__(self) -> Self:
        wait_until(self._file.exists, describe="the gateway's address")
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def base_url(self) -> str:
        """Return the address for a client."""
        return f"http://{self._file.read_text().strip()}"

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        return self._process.pid


@contextlib.contextmanager
def measured(pid: int) -> Iterator[list[Cost]]:
    """Measure a process and its children in the block; the list has the cost after it."""
    cost: list[Cost] = []
    before_s, before_mb = _cpu_s(pid), _memory_mb(pid, "VmRSS")
    for each in _family(pid):
        Path(f"/proc/{each.pid}/clear_refs").write_text("5")  # resets the peak
    yield cost
    cost.append(Cost(_cpu_s(pid) - before_s, _memory_mb(pid, "VmHWM") - before_mb))


def _family(pid: int) -> list[psutil.Process]:
    own = psutil.Process(pid)
    return [own, *own.children(recursive=True)]


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process and of its children, finished ones included."""
    own, *live = [each.cpu_times() for each in _family(pid)]
    ended = own.children_user + own.children_system
    return own.user + own.system + ended + sum(each.user + each.system for each in live)


def _memory_mb(pid: int, field: str) -> float:
    return sum(_kilobytes(each.pid, field) for each in _family(pid)) / 1024


def _kilobytes(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
