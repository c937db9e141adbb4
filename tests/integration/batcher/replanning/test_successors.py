"""Planners and replicas after a withdrawal continue as if the plans had never existed."""

import pytest

from testkit import group, wait_until_async
from turnstream.errors import EndOfRunError
from turnstream.store.run.runs import pause_run, resume_run
from turnstream_server.batcher.planner.snapshotting import Upkeep


@pytest.mark.parametrize("selection", ["ready_first", "in_order"])
async def test_leader_that_starts_after_the_withdrawal_makes_the_same_plans(
    house, replan, selection, store, of_3
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
    await wait_until_async(lambda: store.planned(runs[0]) == 2)
    pause_run(house.client, runs[1])
    await replan(runs[1])
    assert store.planned(runs[1]) == 0
    await first.stop()

    second = await house.start_batcher()
    resume_run(house.client, runs[1])
    await wait_until_async(lambda: store.planned(runs[1]) == 2)
    for run in runs:
        trainer = house.trainer(second, run)
        await trainer.start("b")
        await trainer.stepped(await trainer.get(1))
        await house.publish(run, group("g5"), group("g6"))
        await trainer.get(3)

    assert store.plans(runs[0]) == store.plans(runs[1])
    assert store.chain(runs[1]) == [1, 2, 3]
    assert house.states(runs[0]) == house.states(runs[1])


async def test_successor_with_snapshots_makes_the_same_plans_after_a_withdrawal(
    house, replan, store, of_3
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
    assert store.chain(run) == [1, 2, 3]


async def test_a_run_that_had_ended_ends_again_with_what_is_left(house, planned, replan, store):
    run, trainer = await planned(group("g0"), group("g1"), closes=True, step=2)
    await wait_until_async(lambda: house.frontier(run).is_finished)
    house.damage(run, "g0/0/0")

    await replan(run)
    await trainer.start("b")
    (pulled,) = await trainer.get(1)
    await trainer.stepped([pulled])

    assert pulled.mini_batch.rows.group_id == ["g1", "g1"]
    with pytest.raises(EndOfRunError):
        await trainer.get(2)
