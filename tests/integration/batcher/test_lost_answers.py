"""The answer to a seal's event is lost, and the run continues without its generator."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from harness.proxy import Proxy
from testkit import ids, wait_until_async
from testkit.scripts import script
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.types import TrajectoryState
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.bus.queries.ledger import read_ledger

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


async def test_seal_with_a_lost_answer_counts_after_the_run_released_it(
    house: Any,
) -> None:
    run = house.create_run(batch_groups=1, retain_checkpoints=1)
    small = Upkeep(snapshot_events=1, snapshot_steps=1, fold_ended=2)
    trainer = await house.start_trainer(run, upkeep=small)

    with Proxy(house.url) as proxy:
        proxy.unanswered = script("post_sealed").sha.encode()
        sealing = asyncio.create_task(asyncio.to_thread(_seal, proxy.url, run))
        pulled = await trainer.get(1, wait_s=60)
        await trainer.committed(await trainer.stepped(pulled))
        await _folded(house.url, run)
        proxy.unanswered, proxy.replies.is_silent = b"", False
        proxy.cut_all()
        statistics = await sealing

    assert (statistics.num_trajectories, statistics.num_lost) == (1, 0)
    assert read_ledger(house.client, run).by_state[TrajectoryState.COMMITTED] == 1


def _seal(url: str, run: str) -> Any:
    with Publisher(url, run, timeout_s=60) as publisher:
        writer = publisher.trajectory("g", 0, num_samples=1)
        writer.append(ids("ab"), ids("c"))
        writer.seal(1.0)
        publisher.flush()
        return publisher.statistics()


async def _folded(url: str, run: str) -> None:
    def is_folded() -> bool:
        with connect(url) as client:
            return not client.hexists(keys.run_keys(run).ledger, "g/0/0")

    await wait_until_async(lambda: asyncio.to_thread(is_folded), describe="the release")
