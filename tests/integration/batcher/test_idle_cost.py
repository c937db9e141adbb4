"""Real batcher processes with many idle runs: their cost, and what they survive."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from testkit import config, group, wait_until
from turnstream.batching.config import BatchingConfig
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import close_run, create_run
from turnstream_server.bus.core.frontier import read_frontier
from turnstream_server.embedded import EmbeddedServer

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

WINDOW_S = 4.0
RUN = "run"

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A store that keeps its data over a restart."""
    with EmbeddedServer(tmp_path / "data") as server:
        yield server


@pytest.fixture
def start_batcher(start_batcher_process: Start) -> Start:
    """`start_batcher()` starts a batcher process, and returns it when it answers."""

    def start(failpoint: str = "") -> subprocess.Popen[str]:
        process = start_batcher_process(failpoint, leader_lease_s=2.0, park_after_s=0.3)
        assert process.stdout is not None
        assert process.stdout.readline()
        return process

    return start


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[redis.Redis]:
    with connect(server.url) as client:
        yield client


def one_group_config() -> BatchingConfig:
    return config(1)


def is_parked(client: redis.Redis, run: str) -> bool:
    return bool(client.hexists(keys.run_keys(run).leader, "parked"))


def epoch(client: redis.Redis, run: str) -> int:
    found: Any = client.hget(keys.run_keys(run).leader, "epoch")
    return int(found or 0)


def publish(server: EmbeddedServer, run: str, name: str = "g0") -> None:
    with Publisher(server.url, run) as publisher:
        publisher.publish(group(name)).result(30)


def until_planned(client: redis.Redis, run: str, step: int) -> None:
    wait_until(lambda: read_frontier(client, run).planned == step, describe=f"step {step}")


def num_commands(client: redis.Redis) -> int:
    found: Any = client.info("stats")
    return found["total_commands_processed"]


def cpu_s(process: subprocess.Popen[str]) -> float:
    return time.clock_gettime((~process.pid << 3) | 2)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the CPU clock of a process")
@pytest.mark.parametrize(("num_replicas", "num_runs"), [(1, 200), (2, 50)])
def test_idle_and_closed_runs_cost_no_polling(
    client: redis.Redis, start_batcher: Start, num_replicas: int, num_runs: int
) -> None:
    runs = [f"{kind} {number}" for kind in ("idle", "closed") for number in range(num_runs)]
    for run in runs:
        create_run(client, run, one_group_config())
        if run.startswith("closed"):
            close_run(client, run)
    processes = [start_batcher() for _ in range(num_replicas)]
    open_runs = runs[:num_runs] if num_replicas > 1 else runs
    wait_until(
        lambda: all(is_parked(client, run) for run in open_runs), 120, describe="parked runs"
    )
    wait_until(lambda: is_quiet(client), 120, describe="a quiet store")

    commands, used_s = num_commands(client), [cpu_s(each) for each in processes]
    time.sleep(WINDOW_S)

    assert num_commands(client) - commands < 50 * num_replicas
    for process, before_s in zip(processes, used_s, strict=True):
        assert cpu_s(process) - before_s < WINDOW_S / 20


def is_quiet(client: redis.Redis) -> bool:
    before = num_commands(client)
    time.sleep(1)
    return num_commands(client) - before < 20


@pytest.mark.parametrize("place", ["park.before", "park.after"])
def test_work_that_arrives_while_a_run_is_parked_is_done(
    server: EmbeddedServer, client: redis.Redis, start_batcher: Start, place: str
) -> None:
    create_run(client, RUN, one_group_config())
    process = start_batcher(f"{place}=stop")
    wait_until(lambda: is_stopped(process), describe=place)

    publish(server, RUN)
    process.send_signal(signal.SIGCONT)

    until_planned(client, RUN, 1)


def is_stopped(process: subprocess.Popen[str]) -> bool:
    with open(f"/proc/{process.pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"
