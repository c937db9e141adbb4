"""Planners and replicas after a withdrawal continue as if the plans had never existed."""

import asyncio
from typing import Any

import pytest

from testkit import group, trajectory, turn
from turnstream.errors import ConflictError, EndOfRunError
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import pause_run, resume_run
from turnstream.types import TrajectoryKey, TrajectoryState
from turnstream_server.batcher.planner import releaser
from turnstream_server.batcher.planner.upkeep import Upkeep
from turnstream_server.bus.admin.forks import fork_run

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


@pytest.mark.parametrize("selection", ["ready_first", "in_order"])
async def test_leader_that_starts_after_the_withdrawal_makes_the_same_plans(
    house, damage, replan, selection, look, of_3
):
    # One leader goes on itself. The other is gone right after, as a pause lets us see.
    runs = [
        house.create_run(batch_groups=2, selection=selection, drop_zero_variance=True)
        for _ in range(2)
    ]
    first = await house.start_batcher(lease_s=0.5)
    for run in runs:
        trainer = house.trainer(first, run)
        await house.publish(run, of_3("g0"), group("g1"), group("g2"), group("g3"), group("g4"))
        await trainer.start("a")
        await trainer.get(2)
        damage(run, TrajectoryKey("g0", sample=1))
        damage(run, TrajectoryKey("g2", sample=0))
    await replan(runs[0])
    await look.until(lambda: look.planned(runs[0]) == 2)
    with connect(house.url) as client:
        pause_run(client, runs[1])
    await replan(runs[1])
    assert look.planned(runs[1]) == 0
    await first.stop()

    second = await house.start_batcher()
    with connect(house.url) as client:
        resume_run(client, runs[1])
    await look.until(lambda: look.planned(runs[1]) == 2)
    for run in runs:
        trainer = house.trainer(second, run)
        await trainer.start("b")
        await trainer.stepped(await trainer.get(1))
        await house.publish(run, group("g5"), group("g6"))
        await trainer.get(3)

    assert look.plans(runs[0]) == look.plans(runs[1])
    assert look.chain(runs[1]) == [1, 2, 3]
    assert look.states(runs[0]) == look.states(runs[1])


async def test_snapshots_and_events_lead_on_from_a_withdrawal_to_the_same_plans(
    house, damage, replan, look, of_3
):
    run = house.create_run(batch_groups=1)
    often = Upkeep(snapshot_events=1, snapshot_steps=1)
    first = await house.start_batcher(lease_s=0.5, upkeep=often)
    trainer = house.trainer(first, run)
    await house.publish(run, of_3("g0"), of_3("g1"))
    await trainer.start("a")
    await trainer.get(2)
    damage(run, TrajectoryKey("g0", sample=1))
    await replan(run)
    await trainer.start("b")
    await trainer.get(2)
    await first.stop()

    second = house.trainer(await house.start_batcher(upkeep=often), run)
    await second.start("c")
    await second.stepped(await second.get(1))
    await house.publish(run, group("g2"))
    (pulled,) = await second.get(3)

    assert pulled.mini_batch.rows.trajectory_id == ["g2/0/0", "g2/1/0"]
    assert pulled.mini_batch.rows.row_id[0] == 5
    assert look.chain(run) == [1, 2, 3]


async def test_another_replica_serves_what_was_planned_again_and_all_that_follows(
    house, damage, replan, of_3
):
    run = house.create_run(batch_groups=1)
    planner = house.trainer(await house.start_batcher(), run)
    await house.publish(run, of_3("g0"), group("g1"))
    await planner.start("a")
    await planner.get(2)
    other = house.trainer(await house.start_batcher(), run)  # the first one leads
    other.session_epoch = planner.session_epoch
    await other.get(2)
    damage(run, TrajectoryKey("g0", sample=1))

    await replan(run)
    await other.start("b")
    (pulled,) = await other.get(1)
    await other.stepped([pulled])
    (second,) = await other.get(2)
    later = asyncio.create_task(other.get(3))
    await house.publish(run, group("g2"))
    (third,) = await later

    assert pulled.mini_batch.rows.trajectory_id == ["g0/0/0", "g0/2/0"]
    assert second.mini_batch.rows.group_id == ["g1", "g1"]
    assert third.mini_batch.info.revision == 0


async def test_a_run_that_had_ended_ends_again_with_what_is_left(house, damage, replan, look):
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, group("g0"), group("g1"), closes=True)
    await trainer.start("a")
    await trainer.get(2)
    await look.until(lambda: look.frontier(run).is_finished)
    damage(run, TrajectoryKey("g0", sample=0))

    await replan(run)
    await trainer.start("b")
    (pulled,) = await trainer.get(1)
    await trainer.stepped([pulled])

    assert pulled.mini_batch.rows.group_id == ["g1", "g1"]
    with pytest.raises(EndOfRunError):
        await trainer.get(2)


async def test_replanned_batches_are_released_and_forked_like_others(
    house, damage, replan, look, of_3
):
    run = house.create_run(batch_groups=1, retain_checkpoints=1)
    trainer = house.trainer(await house.start_batcher(upkeep=Upkeep(snapshot_events=1)), run)
    await house.publish(run, of_3("g0"), group("g1"))
    await trainer.start("a")
    await trainer.get(2)
    damage(run, TrajectoryKey("g0", sample=0))
    await replan(run)
    await trainer.start("b")
    for step in (1, 2):
        token = await trainer.stepped(await trainer.get(step))
        await trainer.committed(token)
        with connect(house.url) as client:
            fork_run(client, run, f"{run} at {step}", token)

    await look.until(lambda: look.frontier(run).released == 2)
    await look.until(lambda: len(look.plans(run)) == 0)

    assert look.states(run) == {TrajectoryState.COMMITTED: 4, TrajectoryState.DEAD: 1}


@pytest.mark.parametrize("is_replanned_at_once", [False, True])
async def test_ends_in_a_withdrawn_group_leave_the_ledger_when_it_is_replanned(
    house, damage, replan, look, caplog, monkeypatch, is_replanned_at_once
):
    # The releaser has found the group planned, and comes to it when it is not any more.
    monkeypatch.setattr(
        releaser, "SEARCH_REST", 0
    )  # it would rest for longer than it is held up here
    found, is_withdrawn, came_back, is_replanned = (asyncio.Event() for _ in range(4))

    async def hold(act: str) -> None:
        if act == "fold_ended":
            found.set()
            await is_withdrawn.wait()
        elif is_withdrawn.is_set():
            came_back.set()

    fold_once = releaser.fold_ended

    async def fold(*arguments: Any, **named: Any) -> bool:
        try:
            return await fold_once(*arguments, **named)
        except ConflictError:
            if is_replanned_at_once:  # before the releaser reads the group again
                came_back.set()
                await is_replanned.wait()
            raise

    monkeypatch.setattr(releaser, "fold_ended", fold)
    run = house.create_run(batch_groups=1, deadline_policy="train_short", group_deadline_s=60.0)
    batcher = await house.start_batcher(upkeep=Upkeep(fold_ended=1), before_act=hold)
    trainer = house.trainer(batcher, run)
    members = [
        trajectory(turn("ab", "CD"), sample=sample, reward=reward)
        for sample, reward in enumerate((0.0, 1.0, 2.0, None))
    ]
    await house.publish(run, group("g0", *members))
    await trainer.start("a")
    await trainer.get(1)
    await found.wait()
    damage(run, TrajectoryKey("g0", sample=0))
    with connect(house.url) as client:
        pause_run(client, run)
    await replan(run)

    is_withdrawn.set()
    await came_back.wait()
    with connect(house.url) as client:
        resume_run(client, run)
    await trainer.start("b")
    (pulled,) = await trainer.get(1)
    is_replanned.set()
    await look.until(lambda: look.num_folded(run) == 1)

    assert pulled.mini_batch.rows.trajectory_id == ["g0/1/0", "g0/2/0"]
    assert "failed" not in caplog.text
