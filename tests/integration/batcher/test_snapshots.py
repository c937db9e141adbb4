"""A leader continues from its predecessor's snapshot as if it had led all the time."""

from dataclasses import replace
from typing import Any

import pytest

from testkit import group, wait_until_async
from turnstream.batching.planning.plan_batch import event_order
from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.run.revisions import read_revisions, revise_config
from turnstream.types import BatchDue
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.bus.planning.manifests import read_plan

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


async def test_config_of_the_snapshot_chooses_groups_for_unplanned_steps_only(
    house,
):
    run = house.create_run(batch_groups=1, selection="oldest_weights")
    often = Upkeep(snapshot_steps=1)
    config = replace(read_revisions(house.client, run).last.config, batch_groups=2)
    revise_config(house.client, run, config, from_step=2)
    first = await house.start_batcher(lease_s=0.5, upkeep=often)
    trainer = house.trainer(first, run)
    await house.publish(run, group("g0"), group("g1"), group("g2"))
    await trainer.start("a")
    await trainer.stepped(await trainer.get(1))
    await trainer.stepped(await trainer.get(2))
    await first.stop()
    await house.publish(run, group("g3"), group("g4"))
    late: Any = house.client.xadd(keys.run_keys(run).events, {"r": encode_event(BatchDue(step=2))})

    await house.start_batcher(upkeep=often)

    async def planned():
        return read_plan(house.client, run, 3)

    third = await wait_until_async(planned)
    assert third is not None
    manifest = third.manifest
    assert [each.group_id for each in manifest.groups] == ["g3", "g4"]
    assert event_order(manifest.last_event_id) > event_order(late.decode())
