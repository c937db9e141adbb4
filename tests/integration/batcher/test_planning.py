import asyncio

import pytest

from testkit import group, stored_turn, trajectory, turn
from turnstream.batching.merge.plan import Manifest
from turnstream.types import TrajectoryState
from turnstream_server.batcher.planner import chain
from turnstream_server.bus.core.frontier import read_frontier

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


async def test_group_without_signal_is_filtered_and_frees_its_place(house):
    run, trainer = await house.serve(batch_groups=1, drop_zero_variance=True)
    equal = [trajectory(turn("ab", "CD"), sample=sample, reward=1.0) for sample in range(2)]
    await trainer.start()

    await house.publish(run, group("equal", *equal), group("g1"))
    (pulled,) = await trainer.get(1)

    assert pulled.mini_batch.rows.group_id == ["g1", "g1"]
    assert house.states(run) == {TrajectoryState.FILTERED: 2, TrajectoryState.PLANNED: 2}
    assert read_frontier(house.client, run).num_live_groups == 1


@pytest.mark.parametrize("ahead", [0, 1, 2])
async def test_awaited_step_and_the_allowed_steps_ahead_are_planned(house, ahead):
    run, trainer = await house.started(
        *(group(f"g{i}") for i in range(4)), batch_groups=1, max_planned_ahead=ahead
    )

    await trainer.get(1 + ahead)
    await trainer.refused(
        2 + ahead, words=f"step {2 + ahead}: .*; step 1 is planned and not stepped"
    )

    assert read_frontier(house.client, run).planned == 1 + ahead


async def test_seal_without_its_event_is_posted_when_its_lease_ends(house):
    run = house.create_run(batch_groups=1, lease_s=2.0)
    house.seal_group_of_one(run, "g0", stored_turn("ab", "CD"), posts=False)
    house.end_leases(run)

    trainer = await house.start_trainer(run)
    (pulled,) = await trainer.get(1)

    assert pulled.rows == ["abCD"]


async def test_plan_overtaken_by_a_rollback_names_the_new_lineage(house, caplog):
    is_held, may_write = asyncio.Event(), asyncio.Event()

    async def hold(manifest: Manifest) -> None:
        if manifest.step == 3:
            is_held.set()
            await may_write.wait()

    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(before_write=hold), run)
    await house.publish(run, group("g0"), group("g1"))
    await trainer.start("a")
    token = await trainer.stepped(await trainer.get(1))
    await trainer.stepped(await trainer.get(2))
    await house.publish(run, group("g2"))
    await is_held.wait()

    await trainer.start("back", token=str(token))
    may_write.set()
    (second,), (third,) = await trainer.get(2), await trainer.get(3)

    assert (second.mini_batch.info.lineage, third.mini_batch.info.lineage) == ("main", "main-1")
    assert third.mini_batch.rows.group_id == ["g2", "g2"]
    assert "failed" not in caplog.text


async def test_oddities_of_the_batches_are_logged_once(house, caplog):
    run, trainer = await house.serve(batch_groups=1)
    alone = [group(f"g{i}", trajectory(turn("ab", "CD"))) for i in range(2)]
    await trainer.start()

    await house.publish(run, *alone)
    await trainer.get(1)
    await trainer.get(2)

    of_batches = [record for record in caplog.records if record.name == chain.__name__]
    warnings = [record.getMessage() for record in of_batches if record.levelname == "WARNING"]
    assert warnings == [
        (
            f"step 1 of run {run}: groups of one trajectory, which get an advantage of 0: 1; "
            "the next batches are not reported"
        )
    ]
