"""Junk in the events of one run, while another run trains on the same batcher."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from testkit import group
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream_server.bus.admin.dead_letters import read_dead_letters

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

NUM_SMALL, NUM_LARGE = 3_000, 20
LONGEST_STALL_S = 0.5


def write_junk(url: str, run: str) -> None:
    """Write small records, records of a megabyte, and records beyond the limit."""
    with connect(url) as client:
        stream = keys.run_keys(run).events
        pipeline = client.pipeline(transaction=False)
        for number in range(NUM_SMALL):
            pipeline.xadd(stream, {"r": b"junk %d" % number})
        pipeline.execute()
        for _ in range(NUM_LARGE):
            client.xadd(stream, {"r": bytes(1_000_000)})
            client.xadd(stream, {"r": bytes(3_000_000)})


def num_rejected(url: str, run: str) -> int:
    with connect(url) as client:
        found: Any = client.zcard(keys.run_keys(run).rejected)
    return found


async def longest_stall_s(until: asyncio.Event) -> float:
    """Return the longest time for which the event loop ran no other task."""
    clock, longest_s = asyncio.get_running_loop().time, 0.0
    while not until.is_set():
        started_s = clock()
        await asyncio.sleep(0.001)
        longest_s = max(longest_s, clock() - started_s)
    return longest_s


async def test_junk_in_one_run_does_not_delay_another(house: Any, caplog: Any) -> None:
    healthy, hostile = (house.create_run(batch_groups=1) for _ in range(2))
    trainer = house.trainer(await house.start_batcher(), healthy)
    await trainer.start()
    await asyncio.to_thread(write_junk, house.url, hostile)
    is_done = asyncio.Event()
    watching = asyncio.create_task(longest_stall_s(is_done))

    step = 0
    while await asyncio.to_thread(num_rejected, house.url, hostile) < NUM_SMALL + 2 * NUM_LARGE:
        step += 1
        await house.publish(healthy, group(f"g{step}"))
        await trainer.stepped(await trainer.get(step))
    is_done.set()

    assert await watching < LONGEST_STALL_S
    assert len(read_dead_letters(house.client, hostile).events) == 1_000
    assert len([each for each in caplog.records if "events are rejected" in each.message]) < 100
