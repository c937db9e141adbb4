"""A gateway in a process of its own, and the CPU time and memory of processes."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, Self

import psutil

from testkit.waiting import wait_until

_REFERENCE_S: Final = 0.06
"""CPU seconds of `_reference_s` on a quiet machine, where the limits of tests are set."""

_SMALL_S: Final = 1.0
"""CPU seconds that no limit is near to."""

_ITEMS: Final = [{"id": f"g{n}", "ids": [257] * 60, "logprobs": [-0.5] * 20} for n in range(2_000)]


class Cost(NamedTuple):
    """CPU seconds of a process and its children, and the growth of their memory in MiB.

    A core that is shared needs more seconds for the same instructions. So they are divided by the
    slowness of the machine: the time of a reference at the end of the measurement.
    """

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
    used_s, memory_mb = _cpu_s(pid) - before_s, _memory_mb(pid, "VmHWM") - before_mb
    slowness = 1.0
    if used_s > _SMALL_S:
        slowness = max(1.0, statistics.median(_reference_s() for _ in range(5)) / _REFERENCE_S)
    cost.append(Cost(used_s / slowness, memory_mb))


def _reference_s() -> float:
    """Return the CPU seconds that writing JSON, parsing it and adding its numbers takes now."""
    before_s = time.process_time()
    for _ in range(2):
        for each in json.loads(json.dumps(_ITEMS)):
            sum(map(int, each["ids"]), sum(each["logprobs"]))
    return time.process_time() - before_s


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
