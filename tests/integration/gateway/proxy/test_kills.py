"""Answers that an agent saw whole are turns of its trajectory, once, whatever process is killed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import redis

from testkit.services.agents import Agent
from testkit.services.engine_doubles import engine_process
from testkit.services.engine_model import decode
from testkit.services.stores import RunReader
from testkit.waiting import wait_until
from turnstream.batching.merge.merging import turn_prompts
from turnstream.types import SealedTrajectory, TrajectoryKey
from turnstream_server.embedded import EmbeddedServer

NUM_AGENTS = 3
NUM_CALLS = 5


class KilledGateway:
    """A gateway process that is killed and started again at the same address."""

    def __init__(self, url: str, file: Path, engine: str) -> None:
        self._words = ["serve", "gateway", "--redis", url, "--engine", engine]
        self._file = file
        self.address = "127.0.0.1:0"
        self._start()

    def _start(self) -> None:
        self._file.unlink(missing_ok=True)
        listen = ["--listen", self.address, "--address-file", str(self._file)]
        command = [sys.executable, "-m", "turnstream_server.cli", *self._words, *listen]
        self._process = subprocess.Popen(command)
        wait_until(self._file.exists, describe="the gateway's address", timeout_s=60)
        self.address = self._file.read_text().strip()

    def kill(self) -> None:
        """Kill the process, and start another."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._start()

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


@contextmanager
def killed_gateway(url: str, file: Path, engine: str) -> Iterator[KilledGateway]:
    """Run a gateway that is killed in the block."""
    gateway = KilledGateway(url, file, engine)
    try:
        yield gateway
    finally:
        gateway.stop()


def converse(agent: Agent, sample: int, seen: list[tuple[str, str]], is_stream: bool) -> None:
    """Make calls one after the other, each with the answers before, as an agent does."""
    messages: list[Any] = [{"role": "user", "content": f"agent {sample}"}]
    client = agent.client(max_retries=30, timeout=30)
    while len(seen) < NUM_CALLS:
        try:
            answer: Any = client.chat.completions.create(
                model="policy", messages=messages, stream=is_stream
            )
            text = "".join(_pieces(answer)) if is_stream else answer.choices[0].message.content
        except openai.APIError:
            continue  # a cut stream: the agent asks again
        seen.append((messages[-1]["content"], text))
        more = {"role": "user", "content": f"call {sample}.{len(seen)}"}
        messages += [{"role": "assistant", "content": text}, more]


def _pieces(stream: Any) -> Iterator[str]:
    reason = None
    for chunk in stream:
        reason = chunk.choices[0].finish_reason or reason
        yield chunk.choices[0].delta.content or ""
    if reason is None:
        raise openai.APIConnectionError(message="cut", request=None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "num_kills", [2, pytest.param(12, marks=pytest.mark.campaign)], ids=["few", "many"]
)
def test_seen_answers_are_turns_once(
    num_kills: int,
    server: EmbeddedServer,
    client: redis.Redis,
    new_run: Callable[..., str],
    tmp_path: Path,
):
    """Takes more than 5 s: it kills processes."""
    run = new_run(client)
    with (
        engine_process("vllm", tmp_path, delay_s=0.02) as engine,
        killed_gateway(server.url, tmp_path / "address", engine.address) as gateway,
    ):
        base = f"http://{gateway.address}"
        agents = [_agent(base, run, sample) for sample in range(NUM_AGENTS)]
        seen: list[list[tuple[str, str]]] = [[] for _ in agents]
        threads = [
            threading.Thread(target=converse, args=(agent, sample, seen[sample], sample == 0))
            for sample, agent in enumerate(agents)
        ]
        for thread in threads:
            thread.start()
        chance = random.Random(0)
        for kill in range(1, num_kills + 1):
            goal = kill * NUM_AGENTS * NUM_CALLS // (num_kills + 2)
            wait_until(lambda: sum(map(len, seen)) >= goal, describe="calls", timeout_s=120)  # noqa: B023
            threading.Event().wait(chance.uniform(0, 0.3))
            gateway.kill()
        for thread in threads:
            thread.join(timeout=120)
        for agent in agents:
            agent.send("POST", "session/end", json={"reward": 1.0}).raise_for_status()

    reader = RunReader(client, run)
    sealed = [each for each in reader.events() if isinstance(each, SealedTrajectory)]
    shapes = {each.key.sample: each.turns for each in sealed}
    for sample, answers in enumerate(seen):
        assert len(answers) == NUM_CALLS
        turns = reader.turns(TrajectoryKey("g", sample))
        kept = [
            (_last_question(decode(prompt.tolist())), decode(turn.response_ids.tolist()))
            for prompt, turn in zip(turn_prompts(turns), turns, strict=True)
            if not shapes[sample][turn.index].is_left_out
        ]
        assert {*answers} <= {*kept}
        # Nothing continues the last answer, so that an unseen one beside it is kept too.
        assert sorted(each for each in kept if each[0] != answers[-1][0]) == sorted(answers[:-1])


def _agent(base: str, run: str, sample: int) -> Agent:
    body = {"group_id": "g", "sample": sample, "num_samples": NUM_AGENTS}
    answer = httpx2.post(f"{base}/v1/runs/{run}/sessions", json=body).raise_for_status()
    return Agent(f"{base}/openai/v1", answer.json()["key"])


def _last_question(prompt: str) -> str:
    """Return the text of the last message of a user in a prompt without special tokens."""
    return prompt.rpartition("user\n")[2].partition("\n")[0]
