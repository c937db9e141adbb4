"""docker-compose.yml: valid by the compose specification, and its commands run as they stand."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from testkit import wait_until
from turnstream_server.embedded import find_binary, free_port

REPOSITORY = Path(__file__).parents[3]
FILE = REPOSITORY / "docker-compose.yml"
CHECK = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
SERVICES = ["generator", "trainer", "batcher"]
"""In the order in which the test starts them: each before the one it needs, redis last."""


def defaults() -> dict[str, str]:
    """Return the variables of `.env`."""
    lines = (REPOSITORY / ".env").read_text().splitlines()
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}


def services() -> dict[str, Any]:
    """Return the services of the file, with the variables of `.env` in it."""
    known = defaults()
    text = re.sub(r"\$\{(\w+):?-?([^}]*)\}", lambda found: known[found[1]], FILE.read_text())
    return yaml.safe_load(text)["services"]


def test_compose_file_follows_the_compose_specification() -> None:
    done = subprocess.run([*CHECK, FILE], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


def test_variables_of_the_compose_file_have_the_defaults_of_env() -> None:
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", FILE.read_text()))

    assert used == defaults()


def test_base_profile_has_no_generator_and_every_service_restarts() -> None:
    found = services()

    assert {name for name, each in found.items() if "profiles" not in each} == {
        *("redis", "batcher", "trainer")
    }
    assert found["generator"]["profiles"] == ["demo"]
    assert {each["restart"] for each in found.values()} == {"unless-stopped"}


@pytest.mark.timeout(240)
def test_stack_trains_although_every_service_starts_before_its_dependency(
    tmp_path: Path,
) -> None:
    found, store, batcher = services(), free_port(), free_port()
    url = f"redis://127.0.0.1:{store}"
    here = {
        "redis://redis:6379": url,
        "7600": str(batcher),
        "batcher": "127.0.0.1",
        "/data/trainer": str(tmp_path / "trainer"),
    }

    with contextlib.ExitStack() as stack:
        for name in SERVICES:
            stack.enter_context(started(found[name], here=here, log=tmp_path / f"{name}.log"))
        wait_until(
            lambda: (
                "waiting for" in (tmp_path / "batcher.log").read_text()
                and "waiting for" in (tmp_path / "trainer.log").read_text()
            ),
            timeout_s=60,
            describe="services that wait for the store",
        )
        stack.enter_context(store_server(found["redis"]["command"], port=store, folder=tmp_path))
        wait_until(
            lambda: (status(url) or {}).get("committed", 0) >= 10,
            timeout_s=150,
            describe="a committed step",
        )
        seen = status(url)

    assert seen is not None
    assert sum(seen["ledger"].values()) == seen["accepted"]
    assert seen["newest_batch"]["mean_reward"] > 0


def status(url: str) -> dict[str, Any] | None:
    """Return what `turnstream status demo --json` prints; None if there is no such run yet."""
    command = [sys.executable, "-m", "turnstream_server.cli", "status", "demo", "--json"]
    done = subprocess.run(
        [*command, "--redis", url], capture_output=True, text=True, check=False, timeout=60
    )
    return json.loads(done.stdout) if done.returncode == 0 else None


@contextlib.contextmanager
def started(service: dict[str, Any], *, here: dict[str, str], log: Path) -> Iterator[None]:
    """Run the command of a service with its environment; `here` has this machine's addresses."""
    words = [here[word] if word.startswith("/") else word for word in service["command"]]
    environment = {
        name: here.get(str(value), str(value)) for name, value in service["environment"].items()
    }
    with (
        log.open("w") as output,
        subprocess.Popen(
            [sys.executable, "-m", "turnstream_server.cli", *words],
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


@contextlib.contextmanager
def store_server(flags: list[str], *, port: int, folder: Path) -> Iterator[None]:
    """Run redis-server, or Valkey where none is installed, with the flags of the file."""
    binary = shutil.which("redis-server") or str(find_binary())
    place = ["--port", str(port), "--dir", str(folder), "--bind", "127.0.0.1"]
    with subprocess.Popen([binary, *flags, *place], stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()
