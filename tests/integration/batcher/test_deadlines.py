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

DEADLINE_S = 10.0
"""Every write of a test comes before it; then the test lets it pass."""

SHORT = {"group_deadline_s": DEADLINE_S, "deadline_policy": "train_short"}


def open_members(cluster: Any, run: str, *, num_samples: int, sealed: int, **opening: Any) -> None:
    """Open all samples of group "g", and seal the first ones of them; the others hang."""
    publisher = Publisher(cluster.url, run, writer="w")
    writers = [
        publisher.trajectory("g", sample, num_samples=num_samples, **opening)
        for sample in range(num_samples)
    ]
    for writer in writers:  # all of them first: a group that is decided takes no more
        writer.__enter__()
    for sample, writer in enumerate(writers[:sealed]):
        writer.append([1, 2], [3, 4])
        writer.seal(reward=float(sample))
    publisher.close()


async def test_group_with_a_hanging_member_is_trained_short(cluster: Any) -> None:
    run, trainer = await cluster.serve(batch_groups=1, **SHORT)
    await asyncio.to_thread(open_members, cluster, run, num_samples=3, sealed=2)

    cluster.pass_deadlines(run)
    await trainer.start()
    (pulled,) = await trainer.get(1)

    assert pulled.mini_batch.rows.trajectory_id == ["g/0/0", "g/1/0"]
    assert cluster.states(run) == {TrajectoryState.PLANNED: 2, TrajectoryState.SURPLUS: 1}


async def test_hanging_member_is_refilled_by_any_free_generator(cluster: Any) -> None:
    run, trainer = await cluster.serve(
        batch_groups=1, group_deadline_s=DEADLINE_S, deadline_policy="refill", max_refills=1
    )
    await asyncio.to_thread(open_members, cluster, run, num_samples=2, sealed=1, prompt_uid="p7")

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
