"""Benchmark roles as processes: started, gated, and measured in CPU seconds from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def cpu_seconds(pid: int) -> float:
    """User + system CPU seconds of a process, all its threads, finished ones included.

    Linux gives every process a CPU clock whose id is computed from its pid
    (clock_getcpuclockid(3)); it has nanoseconds, where /proc has hundredths.
    """
    return time.clock_gettime((~pid << 3) | 2)


def peak_memory_mb(pid: int) -> float:
    """Peak resident memory of a process, in MB."""
    return _status_mb(pid, "VmHWM")


def resident_mb(pid: int) -> float:
    """Resident memory of a process, in MB."""
    return _status_mb(pid, "VmRSS")


def _status_mb(pid: int, name: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) / 1024


class Role:
    """A child process that answers one JSON line for every JSON line it is sent.

    `python` is its interpreter, by default this one.
    """

    def __init__(
        self,
        script: Path,
        name: str,
        arguments: Mapping[str, Any],
        *,
        python: str = sys.executable,
    ) -> None:
        environment = os.environ | arguments.get("environment", {})
        self.process = subprocess.Popen(
            [python, str(script), "--role", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.name = name
        self.send(arguments)
        self.receive()

    @property
    def pid(self) -> int:
        """Process id, for the clocks."""
        return self.process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Hand over one message; the role starts to work."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Wait for the answer to one message."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the {self.name} process ended early")
        return json.loads(line)

    def stop(self) -> None:
        """End the process and wait for it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=10)


def cpu_of_work(
    roles: Sequence[Role], message: Mapping[str, Any], *pids: Sequence[int]
) -> tuple[float, ...]:
    """Return the CPU seconds of each list of processes while all roles work on a message."""
    before = [sum(map(cpu_seconds, each)) for each in pids]
    for role in roles:
        role.send(message)
    for role in roles:
        role.receive()
    return tuple(
        sum(map(cpu_seconds, each)) - start for each, start in zip(pids, before, strict=True)
    )


def serve_role(
    start: Callable[[dict[str, Any]], Callable[[dict[str, Any]], dict[str, Any]]],
) -> None:
    """The child's side: the first line configures, every further line is one piece of work."""
    work = None
    for line in sys.stdin:
        message = json.loads(line)
        answer: dict[str, Any] = {}
        if work is None:
            work = start(message)
        else:
            answer = work(message)
        print(json.dumps(answer), flush=True)
