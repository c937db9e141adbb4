"""Junk in the events of one run, while another run trains on the same batcher process."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from testkit import group, wait_until_async
from turnstream.records.framing import EVENT, write_frame
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.wire.v1 import records_pb2 as wire
from turnstream_server.bus.admin.dead_letters import read_dead_letters

pytestmark = [pytest.mark.redis, pytest.mark.grpc, pytest.mark.timeout(400)]

logger = logging.getLogger(__name__)

NUM_SMALL = 20_000
NUM_LARGE = 200
NUM_SEALS = 100

# A batcher that writes its address, its CPU seconds and the longest stall of its event loop, in
# CPU seconds of the loop's thread: other processes of the machine do not count.
BATCHER = """
import asyncio, json, os, signal, sys, time
from turnstream_server.batcher.serving.options import BatcherOptions
from turnstream_server.batcher.serving.service import serving

url, path = sys.argv[1:]
status = {"stall_s": 0.0, "address": ""}

async def watch():
    while True:
        started_s = time.thread_time()
        await asyncio.sleep(0.001)
        status["stall_s"] = max(status["stall_s"], time.thread_time() - started_s)

async def main():
    forget = lambda: status.update(stall_s=0.0)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, forget)
    async with serving(BatcherOptions(redis_url=url)) as address:
        status["address"] = address
        watching = asyncio.create_task(watch())
        while True:
            with open(path + ".new", "w") as file:
                json.dump(status | {"cpu_s": time.process_time()}, file)
            os.replace(path + ".new", path)
            await asyncio.sleep(0.2)

asyncio.run(main())
"""


class BatcherProcess:
    """A batcher in a process of its own."""

    def __init__(self, url: str, path: Path) -> None:
        self._url = url
        self._path = path
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Return when it answers."""
        words = (sys.executable, "-c", BATCHER, self._url, str(self._path))
        self._process = await asyncio.create_subprocess_exec(*words)

        async def is_there() -> bool:
            return self._path.exists() and bool(self.status()["address"])

        await wait_until_async(is_there, describe="the batcher's address")

    def status(self) -> Any:
        """Address, CPU seconds, and the longest stall since `forget_stalls`."""
        return json.loads(self._path.read_text())

    def forget_stalls(self) -> None:
        """Measure stalls from now on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGUSR1)

    def memory_mb(self, name: str) -> float:
        """VmRSS or VmHWM of the process."""
        assert self._process is not None
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        (line,) = [each for each in lines if each.startswith(f"{name}:")]
        return int(line.split()[1]) / 1024

    async def stop(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            await self._process.wait()


@pytest.fixture
async def batcher(house: Any, tmp_path: Path) -> Any:
    process = BatcherProcess(house.url, tmp_path / "status")
    await process.start()
    yield process
    await process.stop()


def large_seal() -> bytes:
    """A seal under a right checksum with as many turns as an event can hold."""
    turns = [wire.TurnShape(parent_turn=-1)] * 250_000
    message = wire.TrajectorySealed(
        key=wire.TrajectoryKey(group_id="g"), status="completed", turns=turns
    )
    return write_frame(EVENT, wire.Event(trajectory_sealed=message).SerializeToString())


def write_junk(url: str, run: str) -> int:
    """Small records, records of a megabyte, records beyond the limit and large seals."""
    seal = large_seal()
    records = [b"junk %d" % number for number in range(NUM_SMALL)]
    with connect(url) as client:
        stream = keys.run_keys(run).events
        for start in range(0, len(records), 1_000):
            pipeline = client.pipeline(transaction=False)
            for record in records[start : start + 1_000]:
                pipeline.xadd(stream, {"r": record})
            pipeline.execute()
        for _ in range(NUM_LARGE):
            client.xadd(stream, {"r": bytes(1_000_000)})
            client.xadd(stream, {"r": bytes(3_000_000)})
        for _ in range(NUM_SEALS):
            client.xadd(stream, {"r": seal})
    return NUM_SMALL + 2 * NUM_LARGE + NUM_SEALS


async def train(house: Any, trainer: Any, run: str, steps: range) -> float:
    """Train steps; the longest time from the last seal of a group to its step."""
    longest_s = 0.0
    clock = asyncio.get_running_loop().time
    for step in steps:
        await house.publish(run, group(f"g{step}"))
        started_s = clock()
        await trainer.stepped(await trainer.get(step, wait_s=60))
        longest_s = max(longest_s, clock() - started_s)
    return longest_s


async def test_junk_in_one_run_does_not_delay_another(house: Any, batcher: Any) -> None:
    # 20,000 junk events cost the batcher 33 s of CPU and 10 GB: each had a call of the store and a
    # line of the log of its own, and a read returned 400 of them however long they were.
    healthy, hostile = (house.create_run(batch_groups=1) for _ in range(2))
    trainer = house.trainer(batcher.status()["address"], healthy)
    await trainer.start()
    await train(house, trainer, healthy, range(1, 3))
    usual_s = await train(house, trainer, healthy, range(3, 11))
    batcher.forget_stalls()
    before, before_mb = batcher.status(), batcher.memory_mb("VmRSS")

    junk = asyncio.create_task(asyncio.to_thread(write_junk, house.url, hostile))
    step, longest_s = 11, 0.0

    def num_rejected() -> int:
        with connect(house.url) as client:
            letters = read_dead_letters(client, hostile)
        return len(letters.events) + letters.num_discarded_events

    while not junk.done() or await asyncio.to_thread(num_rejected) < junk.result():
        longest_s = max(longest_s, await train(house, trainer, healthy, range(step, step + 5)))
        step += 5

    after = batcher.status()
    cpu_s = after["cpu_s"] - before["cpu_s"]
    grown_mb = batcher.memory_mb("VmHWM") - before_mb
    with connect(house.url) as client:
        letters = read_dead_letters(client, hostile)
    logger.info(
        "%d steps, usual %.3f s, longest %.3f s, CPU %.1f s, stall %.3f s, grown %.0f MB",
        *(step - 1, usual_s, longest_s, cpu_s, after["stall_s"], grown_mb),
    )
    assert grown_mb < 200
    assert after["stall_s"] < 0.3
    assert cpu_s < 20
    assert len(letters.events) == 1_000
    assert letters.num_bytes <= 1_000 * 65_536
