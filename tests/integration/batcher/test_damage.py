"""Damaged payload, before its batch is planned and after."""

import pytest

from testkit import group
from turnstream.errors import CorruptRecordError
from turnstream.types import TrajectoryState

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


async def test_group_too_small_after_damage_is_replaced_by_the_next(house):
    run, trainer = await house.serve(batch_groups=2)
    await house.publish(run, group("g0"))
    house.damage(run, "g0/1/0")

    await house.publish(run, group("g1"), group("g2"))
    await trainer.start()
    (pulled,) = await trainer.get(1)

    assert sorted(set(pulled.mini_batch.rows.group_id)) == ["g1", "g2"]
    assert "checksum" in house.dead_letters(run).trajectories[0].reason
    assert house.states(run) == {
        TrajectoryState.PLANNED: 4,
        TrajectoryState.INCOMPLETE: 1,
        TrajectoryState.DEAD: 1,
    }


async def test_damage_after_planning_is_reported_to_every_rank(house):
    run = house.create_run(batch_groups=1)
    planner = house.trainer(await house.start_batcher(), run)
    await house.publish(run, group("g0"))
    await planner.start("s", dp_world_size=2)
    await planner.get(1)
    other = house.trainer(await house.start_batcher(), run)  # the first one leads, and keeps rows

    house.damage(run, "g0/1/0")
    await other.start("s", dp_world_size=2)

    for rank in range(2):
        with pytest.raises(CorruptRecordError, match=r"step 1: .*g0/1/0: .*checksum"):
            await other.get(1, dp_rank=rank)
