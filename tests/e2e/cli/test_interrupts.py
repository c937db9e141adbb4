"""Ctrl-C at any time of a command: status 130, and no traceback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e]

REPOSITORY = Path(__file__).parents[3]
PROGRAM: str = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"][
    "turnstream"
]
ENTRY, _, FUNCTION = PROGRAM.partition(":")
QUIET = ("", "interrupted\n")

AT_IMPORT = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
module = sys.argv.pop(1)
def interrupt(event, arguments):
    if event == "import" and arguments[0] == module:
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(interrupt)
from {ENTRY} import {FUNCTION}
{FUNCTION}()
"""
"""The console script, which gets SIGINT as it begins to import the module argv[1]."""

SAYS_GO = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from {ENTRY} import {FUNCTION}
print("go", flush=True)
{FUNCTION}()
"""
"""The console script, which says when the first line of ours has run."""


@pytest.fixture
def silent_store() -> Iterator[str]:
    """The address of a store that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    "module",
    [
        *("typer", "inspect", "turnstream.errors", "pydantic_core", "redis"),
    ],
)
def test_interrupt_during_an_import_prints_no_traceback(module: str, silent_store: str) -> None:
    command = [sys.executable, "-c", AT_IMPORT, module, "run", "list", "--redis", silent_store]

    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    assert ended.returncode == 130
    assert ended.stderr in QUIET


def test_interrupt_swallowed_by_an_import_still_ends_the_command(silent_store: str) -> None:
    # A KeyboardInterrupt in a callback of the import system is printed and lost.
    hook = "os.kill(os.getpid(), signal.SIGINT)"
    swallowing = AT_IMPORT.replace(hook, f"exec('try: {hook}\\nexcept BaseException: pass')")
    words = ["pydantic_core", "run", "list", "--redis", silent_store]
    command = [sys.executable, "-c", swallowing, *words]

    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    assert (ended.returncode, ended.stderr) == (130, "")


@pytest.mark.parametrize("after_s", [0, 0.3, 2.0])
def test_interrupt_of_up_leaves_no_process(after_s: float, tmp_path: Path) -> None:
    mark = f"mark-{tmp_path}-{after_s}"
    ports = ["--port", "0", "--store-port", "0", "--http-port", "0"]
    options = [*ports, "--data-dir", str(tmp_path / "up")]
    command = [sys.executable, "-c", SAYS_GO, "up", *options]

    environment = {**os.environ, "TURNSTREAM_TEST_MARK": mark}
    environment.pop("TURNSTREAM_REDIS_URL", None)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(after_s)
        process.send_signal(signal.SIGINT)
        try:
            _, stderr = process.communicate(timeout=60)
        finally:
            process.kill()

    assert process.returncode == 130
    assert stderr in QUIET
    shown = subprocess.run(["ps", "axeww"], capture_output=True, check=True, text=True).stdout
    assert mark not in shown


def test_ignored_interrupt_stays_ignored(silent_store: str) -> None:
    # A shell that starts a command in the background has it ignore Ctrl-C.
    code = AT_IMPORT.replace("signal.default_int_handler", "signal.SIG_IGN")
    command = [sys.executable, "-c", code, "typer", "--help"]

    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    assert ended.returncode == 0
    assert "Services, one process each." in ended.stdout
