"""Services that tests fork behave as those that they start with a command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from testkit.services.forked import popen

COMMAND = [sys.executable, "-P", "-m", "turnstream_server.cli", "serve", "batcher"]


def ended(start: Callable[..., subprocess.Popen[str]], *words: str, **env: str) -> tuple[Any, ...]:
    """Return status and output of a process that ends by itself."""
    pipe = subprocess.PIPE
    process = start(
        [*COMMAND, *words], env={**os.environ, **env}, stdout=pipe, stderr=pipe, text=True
    )
    return process.communicate(timeout=60), process.returncode


def test_forked_service_has_output_and_status_of_a_command() -> None:
    wrong = {"TURNSTREAM_REDIS_URL": "nowhere"}

    for words, env in ((("--help",), {}), ((), wrong), (("--wrong",), {})):
        assert ended(popen, *words, **env) == ended(subprocess.Popen, *words, **env)


def test_forked_service_is_a_child_with_a_session_and_a_folder(tmp_path: Path) -> None:
    env = {**os.environ, "TURNSTREAM_REDIS_URL": "redis://127.0.0.1:1"}
    with popen(
        COMMAND, cwd=tmp_path, env=env, start_new_session=True, stdin=subprocess.PIPE
    ) as own:
        assert own.poll() is None
        seen = psutil.Process(own.pid)
        assert seen.ppid() == os.getpid()
        assert os.getsid(own.pid) == own.pid
        assert Path(seen.cwd()) == tmp_path
        own.kill()

    assert own.returncode == -9
