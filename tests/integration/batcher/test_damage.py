"""Damaged payload, plans, snapshots and counters of a run: named where users look."""

from __future__ import annotations

from typing import Any

import pytest

from testkit import group, wait_until_async
from turnstream.errors import CorruptRecordError, WaitKind, WaitReason
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.waits.wait_reasons import reasons
from turnstream.types import TrajectoryState
from turnstream_server.bus.core.frontier import read_frontier
from turnstream_server.bus.queries.run_snapshot import read_snapshot

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


@pytest.fixture
async def run(house):
    """A run of two planned steps, whose batcher is gone."""
    name = house.create_run(batch_groups=1)
    batcher = await house.start_batcher()
    trainer = house.trainer(batcher, name)
    await house.publish(name, group("g0"), group("g1"))
    await trainer.start("a")
    await trainer.get(2)
    await batcher.stop()
    return name


async def trouble(url: str, run: str) -> str:
    """Why the run is not planned, as soon as a batcher says it."""

    def found() -> list[WaitReason]:
        with connect(url) as client:
            return reasons(read_snapshot(client, run))

    await wait_until_async(lambda: any(each.kind is WaitKind.PLANNING_FAILS for each in found()))
    return next(each.sentence for each in found() if each.kind is WaitKind.PLANNING_FAILS)


async def test_damaged_plan_is_reported_to_ranks_and_by_why(house, run):
    def flip(plans: list[bytes]) -> list[bytes]:
        first, second = plans
        return [first, second[:-9] + bytes([second[-9] ^ 1]) + second[-8:]]

    house.change_records(keys.run_keys(run).plan, flip)
    trainer = await house.start_trainer(run, session="b")

    (first,) = await trainer.get(1)
    with pytest.raises(CorruptRecordError, match="checksum of a manifest"):
        await trainer.get(2)

    assert first.mini_batch.rows.group_id == ["g0", "g0"]
    assert "the checksum of a manifest record" in await trouble(house.url, run)


async def test_damaged_snapshot_is_reported_and_planned_batches_are_delivered(house, run):
    damaged: Any = {"position": "0-0", "step": 0, "record": b"\x00" * 64}
    house.client.hset(keys.run_keys(run).snapshot, mapping=damaged)
    trainer = await house.start_trainer(run, session="b")

    pulled = [*await trainer.get(1), *await trainer.get(2)]

    assert [each.mini_batch.rows.group_id for each in pulled] == [["g0", "g0"], ["g1", "g1"]]
    assert "snapshot record" in await trouble(house.url, run)


DAMAGE = b"\xc5"


async def until_named(house: Any, run: str, words: str) -> None:
    """Until `turnstream why` says these words, in a reason or as its error."""

    async def is_named() -> bool:
        try:
            found = [reason.sentence for reason in reasons(read_snapshot(house.client, run))]
        except CorruptRecordError as error:
            found = [str(error)]
        return any(words in sentence for sentence in found)

    await wait_until_async(is_named, describe=f"a reason that says {words}")


@pytest.mark.parametrize(("part", "field"), [("counts", "sealed"), ("budget", "stored")])
async def test_step_is_planned_whole_after_a_damaged_counter_is_repaired(
    house: Any, part: str, field: str
) -> None:
    run = house.create_run(batch_groups=1)
    await house.publish(run, group("g0"))
    names = keys.run_keys(run)
    count: Any = house.client.hget(getattr(names, part), field)
    house.client.hset(getattr(names, part), field, DAMAGE)

    trainer = house.trainer(await house.start_batcher(), run)
    await until_named(house, run, f"damaged: {getattr(names, part)}, field '{field}'")
    assert (house.client.xlen(names.plan), read_frontier(house.client, run).planned) == (0, 0)
    house.client.hset(getattr(names, part), field, count)

    await trainer.start()
    (pulled,) = await trainer.get(1, wait_s=30)
    assert {*pulled.mini_batch.rows.trajectory_id} == {"g0/0/0", "g0/1/0"}
