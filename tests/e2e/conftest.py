"""Whole jobs as a user starts them, and what they leave behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

FORKED = """
from unittest.mock import patch
from testkit.services import forked
from turnstream_server import cli
from turnstream_server.launch import stack

with patch.object(stack, "subprocess", forked.Subprocess):
    cli.main()
"""
"""The command, whose services are forks of a process that has imported torch once."""


class Job:
    """The command `turnstream` in a folder of its own.

    Attributes:
        folder: where the job works, `--data-dir`.
        json_path: for its summary.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "job"
        self.json_path = folder / "summary.json"
        self._outside = folder / "outside"
        self._outside.mkdir()
        self._mark = f"mark-{uuid.uuid4().hex}"
        self._process: subprocess.Popen[str] | None = None

    def start(self, *arguments: str, forks: bool = False) -> subprocess.Popen[str]:
        """Start it (again) in an empty folder that is also home and temporary folder."""
        program = ("-c", FORKED) if forks else ("-m", "turnstream_server.cli")
        command = [sys.executable, "-P", *program, *arguments]
        outside = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME"), str(self._outside))
        environment = {**os.environ, **outside, "TURNSTREAM_TEST_MARK": self._mark}
        environment.pop("TURNSTREAM_REDIS_URL", None)
        self.close()
        self._process = subprocess.Popen(
            [*command, "--data-dir", str(self.folder)],
            cwd=self._outside,
            env={**environment, "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return self._process

    @property
    def process(self) -> subprocess.Popen[str]:
        """The command that was started last."""
        assert self._process is not None
        return self._process

    def run(self, *arguments: str, timeout_s: float) -> tuple[int, str]:
        """Run it to the end, with forked services: exit status and output."""
        process = self.start(*arguments, forks=True)
        output, _ = process.communicate(timeout=timeout_s)
        return process.returncode, output

    def processes(self) -> list[str]:
        """The processes that this job started and that still run, as `ps` shows them."""
        shown = subprocess.run(
            ["ps", "axeww", "-o", "pid=,stat=,command="], capture_output=True, check=True, text=True
        )
        lines = [line for line in shown.stdout.splitlines() if self._is_ours(line)]
        return [line[:200] for line in lines if not line.split()[1].startswith("Z")]

    def _is_ours(self, line: str) -> bool:
        """By its environment, which the store writes its title over, or by where it works."""
        with contextlib.suppress(OSError):
            works_in = Path(os.readlink(f"/proc/{line.split()[0]}/cwd"))
            return self._mark in line or works_in.is_relative_to(self.folder)
        return self._mark in line

    def files_outside(self) -> list[Path]:
        """What it wrote outside of its folder."""
        return list(self._outside.rglob("*"))

    def logs(self) -> str:
        """What its services said."""
        paths = sorted(self.folder.glob("logs/*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in paths)

    def close(self) -> None:
        """End it if it still runs, and close its output."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.terminate()
            with self._process:
                pass


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job that is not started yet."""
    job = Job(tmp_path)
    yield job
    job.close()
