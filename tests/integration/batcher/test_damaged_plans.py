"""A plan or a snapshot that the disk damaged: planning stops, and everyone gets the reason."""

from __future__ import annotations

from typing import Any

import pytest

from testkit import group, wait_until_async
from turnstream.errors import CorruptRecordError, WaitKind, WaitReason
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.waits.wait_reasons import reasons
from turnstream_server.bus.queries.run_snapshot import read_snapshot

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


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
