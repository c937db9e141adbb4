"""Due scripts on a real store, judged by the timekeeper's reading of its clock."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
import redis.asyncio

from testkit import config, ids
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream.store.client.connection import connect, connect_async
from turnstream.types import TrajectoryState
from turnstream_server.batcher.planner.timekeeper import ClockReading, Timekeeper
from turnstream_server.bus.leadership.leadership import Term, acquire_leadership
from turnstream_server.bus.queries.ledger import read_ledger

pytestmark = pytest.mark.redis

LEASE_S, TAKEOVER_S = 1.0, 10.0
LONG_S = 7_200


@pytest.fixture
async def client(house) -> Any:
    async with connect_async(house.url) as client:
        yield client


async def open_and_leave(house, client: redis.asyncio.Redis, **fields: Any) -> tuple[str, int]:
    """A run with one open trajectory; when its lease ended, in ms: long ago."""
    run = house.create_run(lease_s=LEASE_S, takeover_s=TAKEOVER_S, **fields)
    await acquire_leadership(client, run, owner="p", lease_s=60)

    def write() -> None:
        with Publisher(house.url, run) as publisher:
            publisher.trajectory("g", 0, num_samples=1).append(ids("ab"), ids("c")).result(10)

    await asyncio.to_thread(write)
    seconds, _ = await client.time()
    ended_ms = (seconds - LONG_S) * 1000
    await client.zadd(keys.run_keys(run).leases, {"g/0/0": ended_ms})
    return run, ended_ms


@pytest.mark.parametrize(
    ("after_ms", "steady_s", "num_abandoned"),
    [(10_000, 0.5, 1), (9_999, 0.5, 0), (10_000, 0.49, 0), (3_600_000, 0, 0)],
)
async def test_trajectory_may_be_adopted_before_it_is_abandoned(
    house, client, after_ms, steady_s, num_abandoned
):
    run, ended_ms = await open_and_leave(house, client)
    settings = dataclasses.replace(config(), lease_s=LEASE_S, takeover_s=TAKEOVER_S)
    no_view: Any = None  # this job needs none
    timekeeper = Timekeeper(Term(client, run, 1), no_view, settings)

    pause_s = await timekeeper.abandon_lapsed(ClockReading(ended_ms + after_ms, steady_s, 0.0))

    assert pause_s == LEASE_S / 10
    with connect(house.url) as reader:
        counts = read_ledger(reader, run)
        counts.check()
        assert counts.by_state[TrajectoryState.ABANDONED] == num_abandoned
