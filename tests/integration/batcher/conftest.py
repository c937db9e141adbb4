"""Batcher replicas on a real store, called over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import testkit
from testkit.services.clusters import Cluster, before_write
from turnstream.types import Group
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.assembly.shares import PlannedBatch
from turnstream_server.batcher.serving import running_calls
from turnstream_server.embedded import EmbeddedServer

# A batcher process that dies or stops at a failpoint: url, failpoint, and options as JSON.
BATCHER = """
import asyncio, functools, json, sys
from pathlib import Path
from turnstream_server import failpoints
from turnstream_server.batcher.assembly.archive import archive_step
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.batcher.serving.service import BatcherOptions
from turnstream_server.batcher.serving.service import serving

url, failpoint, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
failpoints.arm(failpoint)
upkeep = options.pop("upkeep", {})
if "folder" in upkeep:
    folder = Path(upkeep.pop("folder"))
    upkeep["archive"] = functools.partial(archive_step, url, folder=folder)

async def main():
    made = BatcherOptions(redis_url=url, upkeep=Upkeep(**upkeep), **options)
    async with serving(made) as address:
        print(address, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    """A server for each test: a replica meets every run that its store has."""
    with EmbeddedServer() as server:
        yield server


@pytest.fixture(autouse=True)
def a_busy_store_answers_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas of a test wait for answers of their store as long as its machine may take."""
    monkeypatch.setattr(running_calls, "_READ_TIMEOUT_S", 30.0)
    monkeypatch.setattr(running_calls, "_READ_EVERY_S", 0.0)
    monkeypatch.setattr(running_calls, "_LEAST_ANSWER_S", 30.0)


@pytest.fixture(autouse=True)
def hooks_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Await the hook of a replica after the check of a plan."""
    check = Assembler.check

    async def check_and_wait(self: Assembler, batch: PlannedBatch) -> None:
        await check(self, batch)
        hook = before_write.get()
        if hook is not None:
            await hook(batch.manifest)

    monkeypatch.setattr(Assembler, "check", check_and_wait)


class PythonProcess(subprocess.Popen[str]):
    """A Python process that talks in lines."""

    def __init__(self, code: str, *arguments: str) -> None:
        pipe = subprocess.PIPE
        super().__init__(
            [sys.executable, "-c", code, *arguments], stdin=pipe, stdout=pipe, text=True
        )

    async def line(self) -> str:
        """Return the next line that it prints."""
        assert self.stdout is not None
        return (await asyncio.to_thread(self.stdout.readline)).strip()


@pytest.fixture
def start_process() -> Iterator[Callable[..., PythonProcess]]:
    """`start_process(code, *arguments)` starts a Python process, which is killed at the end."""
    with contextlib.ExitStack() as stack:

        def start(code: str, *arguments: str) -> PythonProcess:
            process = PythonProcess(code, *arguments)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture
def start_batcher_process(
    server: EmbeddedServer, start_process: Callable[..., PythonProcess]
) -> Callable[..., PythonProcess]:
    """`start_batcher_process(failpoint, **options)` starts a batcher process."""

    def start(failpoint: str = "", **options: Any) -> PythonProcess:
        options = {"leader_lease_s": 0.6, **options}
        return start_process(BATCHER, server.url, failpoint, json.dumps(options))

    return start


@pytest.fixture
async def cluster(server: EmbeddedServer) -> AsyncIterator[Cluster]:
    cluster = Cluster(server.url)
    yield cluster
    await cluster.close()


@pytest.fixture
async def cluster_at() -> AsyncIterator[Callable[[str], Cluster]]:
    clusters: list[Cluster] = []

    def make(url: str) -> Cluster:
        clusters.append(Cluster(url))
        return clusters[-1]

    yield make
    for cluster in clusters:
        await cluster.close()


@pytest.fixture
def of_3() -> Callable[[str], Group]:
    def build(group_id: str) -> Group:
        turn = testkit.turn("ab", "CD")
        members = [testkit.trajectory(turn, sample=s, reward=float(s)) for s in range(3)]
        return testkit.group(group_id, *members)

    return build
