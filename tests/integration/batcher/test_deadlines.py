"""Groups that finish although a member hangs, and the jobs of the timekeeper."""

import asyncio
import dataclasses
from typing import Any

import pytest

from testkit import config
from turnstream.generator import AsyncPublisher, Publisher
from turnstream.types import TrajectoryKey, TrajectoryState
from turnstream_server.batcher.planner import timekeeper
from turnstream_server.ledger.leadership.writes import Term


def open_both_and_seal_one(cluster: Any, run: str) -> None:
    """Open both samples of group "g", and seal the first one; the other hangs."""
    publisher = Publisher(cluster.url, run, writer="w")
    first, second = (publisher.trajectory("g", s, num_samples=2, prompt_uid="p7") for s in (0, 1))
    with first:
        second.__enter__()
        first.append([1, 2], [3, 4])
        first.seal(reward=0.0)
    publisher.close()


async def test_hanging_member_is_refilled_by_any_free_generator(cluster: Any) -> None:
    run, trainer = await cluster.serve(
        batch_groups=1, group_deadline_s=10.0, deadline_policy="refill", max_refills=1
    )
    await asyncio.to_thread(open_both_and_seal_one, cluster, run)

    cluster.pass_deadlines(run)
    async with AsyncPublisher(cluster.url, run) as other:
        refill = await other.next_refill(30)
        async with other.refill_trajectory(refill) as writer:
            await writer.append([1, 2], [5])
            await writer.seal(reward=0.0)
    await trainer.start()
    (pulled,) = await trainer.get(1)

    assert (refill.key, refill.group.prompt_uid) == (TrajectoryKey("g", 1, 1), "p7")
    assert pulled.mini_batch.rows.trajectory_id == ["g/0/0", "g/1/1"]
    assert cluster.states(run) == {TrajectoryState.PLANNED: 2, TrajectoryState.SURPLUS: 1}


@pytest.mark.parametrize(
    ("steady_s", "until_ms"), [(0.5, [40_000]), (0.49, []), (0.0, [])], ids=str
)
async def test_trajectory_may_be_adopted_before_it_is_abandoned(monkeypatch, steady_s, until_ms):
    asked: list[int] = []

    async def abandon(_: Any, *, until_ms: int) -> bool:
        asked.append(until_ms)
        return False

    monkeypatch.setattr(timekeeper, "abandon_lapsed", abandon)
    none: Any = None  # this job needs neither view nor leader
    settings = dataclasses.replace(config(), lease_s=1.0, takeover_s=10.0)
    keeper = timekeeper.Timekeeper(Term(none, "run", 1), none, none, settings)

    pause_s = await keeper.abandon_lapsed(timekeeper.ClockReading(50_000, steady_s, 0.0))

    assert (pause_s, asked) == (0.1, until_ms)
