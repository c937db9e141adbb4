"""Planners and replicas after a withdrawal continue as if the plans had never existed."""

import asyncio

import pytest

from testkit import group, trajectory, turn
from turnstream.errors import EndOfRunError
from turnstream.store.run.runs import pause_run, resume_run
from turnstream.types import TrajectoryState
from turnstream_server.batcher.planner import releaser
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.bus.admin.forks import fork_run


@pytest.mark.parametrize("selection", ["ready_first", "in_order"])
async def test_leader_that_starts_after_the_withdrawal_makes_the_same_plans(
    house, replan, selection, look, of_3
):
    # One leader continues. The other stops right after the withdrawal, while the run is paused.
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
        house.damage(run, "g0/1/0")
        house.damage(run, "g2/0/0")
    await replan(runs[0])
    await look.until(lambda: look.planned(runs[0]) == 2)
    pause_run(house.client, runs[1])
    await replan(runs[1])
    assert look.planned(runs[1]) == 0
    await first.stop()

    second = await house.start_batcher()
    resume_run(house.client, runs[1])
    await look.until(lambda: look.planned(runs[1]) == 2)
    for run in runs:
        trainer = house.trainer(second, run)
        await trainer.start("b")
        await trainer.stepped(await trainer.get(1))
        await house.publish(run, group("g5"), group("g6"))
        await trainer.get(3)

    assert look.plans(runs[0]) == look.plans(runs[1])
    assert look.chain(runs[1]) == [1, 2, 3]
    assert house.states(runs[0]) == house.states(runs[1])


async def test_snapshots_and_events_lead_on_from_a_withdrawal_to_the_same_plans(
    house, replan, look, of_3
):
    run = house.create_run(batch_groups=1)
    often = Upkeep(snapshot_events=1, snapshot_steps=1)
    first = await house.start_batcher(lease_s=0.5, upkeep=often)
    trainer = house.trainer(first, run)
    await house.publish(run, of_3("g0"), of_3("g1"))
    await trainer.start("a")
    await trainer.get(2)
    house.damage(run, "g0/1/0")
    await replan(run)
    await trainer.start("b")
    await trainer.get(2)
    await first.stop()

    second = await house.start_trainer(run, upkeep=often, session="c")
    await second.stepped(await second.get(1))
    await house.publish(run, group("g2"))
    (pulled,) = await second.get(3)

    assert pulled.mini_batch.rows.trajectory_id == ["g2/0/0", "g2/1/0"]
    assert pulled.mini_batch.rows.row_id[0] == 5
    assert look.chain(run) == [1, 2, 3]


async def test_a_run_that_had_ended_ends_again_with_what_is_left(house, planned, replan, look):
    run, trainer = await planned(group("g0"), group("g1"), closes=True, step=2)
    await look.until(lambda: house.frontier(run).is_finished)
    house.damage(run, "g0/0/0")

    await replan(run)
    await trainer.start("b")
    (pulled,) = await trainer.get(1)
    await trainer.stepped([pulled])

    assert pulled.mini_batch.rows.group_id == ["g1", "g1"]
    with pytest.raises(EndOfRunError):
        await trainer.get(2)


async def test_replanned_batches_are_released_and_forked_like_others(
    house, planned, replan, look, of_3
):
    run, trainer = await planned(
        of_3("g0"), group("g1"), step=2, retain_checkpoints=1, upkeep=Upkeep(snapshot_events=1)
    )
    house.damage(run, "g0/0/0")
    await replan(run)
    await trainer.start("b")
    for step in (1, 2):
        token = await trainer.stepped(await trainer.get(step))
        await trainer.committed(token)
        fork_run(house.client, run, f"{run} at {step}", token)

    await look.until(lambda: house.frontier(run).released == 2)
    await look.until(lambda: len(look.plans(run)) == 0)

    assert house.states(run) == {TrajectoryState.COMMITTED: 4, TrajectoryState.DEAD: 1}


async def test_ends_in_a_withdrawn_group_leave_the_ledger_when_it_is_replanned(
    house, replan, look, caplog, monkeypatch
):
    # The releaser has found the group planned, and comes to it when it is not any more.
    monkeypatch.setattr(releaser, "SEARCH_REST", 0)  # it would rest for longer than it waits here
    found, is_withdrawn, came_back = (asyncio.Event() for _ in range(3))

    async def hold(act: str) -> None:
        if act == "fold_ended":
            found.set()
            await is_withdrawn.wait()
        elif is_withdrawn.is_set():
            came_back.set()

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
    house.damage(run, "g0/0/0")
    pause_run(house.client, run)
    await replan(run)

    is_withdrawn.set()
    await came_back.wait()
    resume_run(house.client, run)
    await trainer.start("b")
    (pulled,) = await trainer.get(1)
    await look.until(lambda: look.num_folded(run) == 1)

    assert pulled.mini_batch.rows.trajectory_id == ["g0/1/0", "g0/2/0"]
    assert "failed" not in caplog.text
