"""A rollout as a process, with a gateway, an engine double, and agents that obey their tasks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from testkit.services import gateways, servers
from testkit.services.engine_doubles import EngineDouble, engine_double
from testkit.services.gateway_thread import GatewayThread
from testkit.services.stores import RunReader
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.gateway.config import EngineAddress

AGENT = """
import json, os, pathlib, signal, subprocess, sys, time, urllib.error, urllib.request
def post(route, body):
    headers = {"Content-Type": "application/json"}
    headers["Authorization"] = f"Bearer {os.environ['OPENAI_API_KEY']}"
    url = f"{os.environ['OPENAI_BASE_URL']}/{route}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        return urllib.request.urlopen(request).status
    except urllib.error.HTTPError as error:
        return error.code
task = json.loads(pathlib.Path(os.environ["TURNSTREAM_TASK_FILE"]).read_text())
steps = task["steps"]
assert not {name for name in os.environ if name.startswith("TURNSTREAM_") and "KEY" in name}
print(f"sample {os.environ['TURNSTREAM_SAMPLE']} of {os.environ['TURNSTREAM_GROUP']}", flush=True)
if "nap" in steps:
    time.sleep(4)
messages = [{"role": "user", "content": "6 times 7?"}]
if "openai" in steps:
    import openai
    openai.OpenAI().chat.completions.create(model="policy", messages=messages)
if "call" in steps:
    assert post("chat/completions", {"model": "policy", "messages": messages}) == 200
if "seal" in steps:
    sys.exit(post("session/end", {"reward": 9.0}) != 403)
if "child" in steps:
    subprocess.Popen(["sleep", "1000"])
if "deaf" in steps:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "hang" in steps:
    print("hangs", flush=True)
    time.sleep(1000)
sys.exit(task.get("status", 0))
"""
"""An agent, on the package `openai` or without it; its task has the steps that it takes."""

server = servers.shared_server
new_gateway = gateways.new_gateway


class RolloutProcess:
    """The command `turnstream rollout` in a folder of its own, which can be started again.

    Attributes:
        logs: folder of the output of the agents.
        tasks: file of the tasks.
    """

    def __init__(self, folder: Path, run: str, words: Sequence[str]) -> None:
        self.logs = folder / "logs"
        self.tasks = folder / "tasks.jsonl"
        self._run = run
        self._words = words
        self._agent = folder / "agent.py"
        self._agent.write_text(AGENT)
        self._process: subprocess.Popen[str] | None = None

    def write(self, tasks: Sequence[dict[str, Any]]) -> None:
        """Write the tasks file."""
        self.tasks.write_text("".join(json.dumps(task) + "\n" for task in tasks))

    def start(self, *options: str, agent: Sequence[str] = ()) -> subprocess.Popen[str]:
        """Start it."""
        command = [sys.executable, "-m", "turnstream_server.cli", "rollout", self._run]
        command += [*self._words, "--tasks", str(self.tasks), "--logs", str(self.logs), *options]
        self._process = subprocess.Popen(
            [*command, "--", *(agent or (sys.executable, str(self._agent)))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TURNSTREAM_API_KEY": "tml-rollout"},
        )
        return self._process

    def output(self) -> tuple[int, str]:
        """Wait for its end; return exit status and output."""
        assert self._process is not None
        text, _ = self._process.communicate(timeout=120)
        return self._process.returncode, text

    def outputs(self) -> list[str]:
        """Return the output of each agent."""
        return [path.read_text() for path in sorted(self.logs.glob("*/*.log"))]

    def agents(self) -> list[int]:
        """Return the running processes of agents."""
        found: list[int] = []
        for each in Path("/proc").glob("[0-9]*/environ"):
            try:
                is_ours = f"TURNSTREAM_TASK_FILE={self.logs}".encode() in each.read_bytes()
            except (FileNotFoundError, PermissionError, ProcessLookupError):
                continue
            if is_ours and int(each.parent.name) != os.getpid():
                found.append(int(each.parent.name))
        return found

    def close(self) -> None:
        """End it."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()
        for pid in self.agents():
            os.kill(pid, 9)


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineDouble]:
    """An engine double of vLLM."""
    with engine_double("vllm") as double:
        yield double


@pytest.fixture
def gateway(new_gateway: Callable[..., GatewayThread], engine: EngineDouble) -> GatewayThread:
    """A gateway that samples from the engine."""
    return new_gateway(engines=(EngineAddress.parse(engine.address),))


@pytest.fixture
def run(request: pytest.FixtureRequest, client: redis.Redis, new_run: Callable[..., str]) -> str:
    """A new run, with capacity for all tasks of a test unless it has another `batch_groups`."""
    return new_run(client, batch_groups=getattr(request, "param", 100), lease_s=1)


@pytest.fixture
def reader(client: redis.Redis, run: str) -> RunReader:
    """The run, as the store has it."""
    return RunReader(client, run)


@pytest.fixture
def rollout(tmp_path: Path, run: str, gateway: GatewayThread) -> Iterator[RolloutProcess]:
    """A rollout of the run by the gateway."""
    process = RolloutProcess(tmp_path, run, ["--gateway", gateway.base_url])
    yield process
    process.close()


@pytest.fixture
def own_rollout(
    tmp_path: Path, run: str, server: EmbeddedServer, engine: EngineDouble
) -> Iterator[RolloutProcess]:
    """A rollout of the run that starts a gateway itself."""
    words = ["--redis", server.url, "--engine", engine.address]
    process = RolloutProcess(tmp_path, run, words)
    yield process
    process.close()
