"""Planners and replicas after a withdrawal continue as if the plans had never existed."""

import asyncio
from typing import Any

import pytest

from testkit import ZERO_VARIANCE, group, trajectory, turn, wait_until_async
from turnstream.errors import ConflictError, EndOfRunError
from turnstream.store.client import keys
from turnstream.store.run.runs import pause_run, resume_run
from turnstream_server.batcher.planner import releaser
from turnstream_server.batcher.planner.snapshotting import Upkeep


@pytest.mark.parametrize(
    ("selection", "upkeep"),
    [("ready_first", Upkeep()), ("in_order", Upkeep(snapshot_events=1, snapshot_steps=1))],
)
async def test_leader_that_starts_after_the_withdrawal_makes_the_same_plans(
    cluster, replan, selection, upkeep, store, of_3
):
    # One leader continues. The other stops right after the withdrawal, while the run is paused.
    runs = [
        cluster.create_run(batch_groups=2, selection=selection, group_filters=ZERO_VARIANCE)
        for _ in range(2)
    ]
    first = await cluster.start_batcher(lease_s=0.5, upkeep=upkeep)
    for run in runs:
        trainer = cluster.trainer(first, run)
        await cluster.publish(run, of_3("g0"), group("g1"), group("g2"), group("g3"), group("g4"))
        await trainer.start("a")
        await trainer.get(2)
        cluster.damage(run, "g0/1/0")
        cluster.damage(run, "g2/0/0")
    await replan(runs[0])
    await wait_until_async(lambda: store.planned(runs[0]) == 2)
    pause_run(cluster.client, runs[1])
    await replan(runs[1])
    assert store.planned(runs[1]) == 0
    await first.stop()

    second = await cluster.start_batcher(upkeep=upkeep)
    resume_run(cluster.client, runs[1])
    await wait_until_async(lambda: store.planned(runs[1]) == 2)
    for run in runs:
        trainer = cluster.trainer(second, run)
        await trainer.start("b")
        await trainer.stepped(await trainer.get(1))
        await cluster.publish(run, group("g5"), group("g6"))
        await trainer.get(3)

    assert store.plans(runs[0]) == store.plans(runs[1])
    assert store.chain(runs[1]) == [1, 2, 3]
    assert cluster.states(runs[0]) == cluster.states(runs[1])


async def test_a_run_that_had_ended_ends_again_with_what_is_left(cluster, planned, replan, store):
    run, trainer = await planned(group("g0"), group("g1"), closes=True, step=2)
    await wait_until_async(lambda: cluster.frontier(run).is_finished)
    cluster.damage(run, "g0/0/0")

    await replan(run)
    await trainer.start("b")
    (pulled,) = await trainer.get(1)
    await trainer.stepped([pulled])

    assert pulled.mini_batch.rows.group_id == ["g1", "g1"]
    with pytest.raises(EndOfRunError):
        await trainer.get(2)


@pytest.mark.parametrize("is_planned_again_at_once", [False, True])
async def test_ends_in_a_withdrawn_group_leave_the_ledger_when_planned_again(
    cluster, replan, caplog, monkeypatch, is_planned_again_at_once
):
    # The releaser finds the group planned. It folds the ends after the plan is withdrawn.
    found, is_withdrawn, is_refused, is_planned_again = (asyncio.Event() for _ in range(4))
    compact_ended = releaser.compact_ended

    async def fold(*arguments: Any, **named: Any) -> bool:
        found.set()
        await is_withdrawn.wait()
        try:
            return await compact_ended(*arguments, **named)
        except ConflictError:
            is_refused.set()
            if is_planned_again_at_once:  # before the releaser reads the group again
                await is_planned_again.wait()
            raise

    monkeypatch.setattr(releaser, "compact_ended", fold)
    monkeypatch.setattr(releaser, "SEARCH_REST", 0)  # the search waits here for the test
    run = cluster.create_run(batch_groups=1, deadline_policy="train_short", group_deadline_s=60.0)
    trainer = cluster.trainer(await cluster.start_batcher(upkeep=Upkeep(compact_ended=1)), run)
    rewards = enumerate((0.0, 1.0, 2.0, None))
    members = [trajectory(turn("ab", "CD"), sample=each, reward=own) for each, own in rewards]
    await cluster.publish(run, group("g0", *members))
    await trainer.start("a")
    await trainer.get(1)
    await found.wait()
    cluster.damage(run, "g0/0/0")
    pause_run(cluster.client, run)
    await replan(run)

    is_withdrawn.set()
    await is_refused.wait()
    resume_run(cluster.client, run)
    await trainer.start("b")
    (pulled,) = await trainer.get(1)
    is_planned_again.set()
    frontier = keys.run_keys(run).frontier
    await wait_until_async(lambda: cluster.client.hget(frontier, "ends") == b"1")

    assert pulled.mini_batch.rows.trajectory_id == ["g0/1/0", "g0/2/0"]
    assert "failed" not in caplog.text
