"""A gateway in a process of its own, whose CPU time and memory are measured."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

import psutil

from testkit.waiting import wait_until

_MB = 1 << 20


class Cost(NamedTuple):
    """CPU seconds of a process and its children, and the growth of their memory in MiB."""

    cpu_s: float
    memory_mb: float


class GatewayProcess:
    """A gateway process on the store at `url`.

    Args:
        url: address of the store.
        file: receives the address of the gateway.
        options: further options of `turnstream serve gateway`.
    """

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

    @contextlib.contextmanager
    def measured(self) -> Iterator[list[Cost]]:
        """Measure the block; the list has the cost after it."""
        cost: list[Cost] = []
        before_s, before_mb = self._cpu_s(), self._memory("VmRSS")
        for each in self._all():
            Path(f"/proc/{each.pid}/clear_refs").write_text("5")  # resets the peak
        yield cost
        cost.append(Cost(self._cpu_s() - before_s, self._memory("VmHWM") - before_mb))

    def _all(self) -> list[psutil.Process]:
        own = psutil.Process(self._process.pid)
        return [own, *own.children(recursive=True)]

    def _cpu_s(self) -> float:
        """Return the CPU time of the process and of its children, finished ones included."""
        own = psutil.Process(self._process.pid).cpu_times()
        live = [each.cpu_times() for each in self._all()[1:]]
        ended = own.children_user + own.children_system
        return own.user + own.system + ended + sum(each.user + each.system for each in live)

    def _memory(self, field: str) -> float:
        """Return the sum of a memory field of all processes in MiB."""
        return sum(_kilobytes(each.pid, field) for each in self._all()) * 1024 / _MB


def _kilobytes(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
