"""A leader continues from its predecessor's snapshot as if it had led all the time."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from testkit import group, wait_until_async
from turnstream.batching.fold.readiness import RunFold
from turnstream.records.events import encode_event
from turnstream.records.snapshots import PlannerSnapshot, encode_snapshot
from turnstream.store.client import keys
from turnstream.store.client.connection import connect, connect_async
from turnstream.store.run.revisions import read_revisions, revise_config
from turnstream.types import BatchDue, ConfigRevised, GroupOpened
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.planner.event_loop import first_of
from turnstream_server.batcher.planner.leader import Leader
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.batcher.planner.snapshotting import event_position
from turnstream_server.batcher.planner.upkeep import Upkeep
from turnstream_server.bus.core.frontier import read_frontier_async
from turnstream_server.bus.leadership.leadership import Term, acquire_leadership
from turnstream_server.bus.leadership.snapshots import last_event_id, read_snapshot, save_snapshot
from turnstream_server.bus.planning.manifests import read_plan
from turnstream_server.bus.planning.revisions import announce_revision, read_revisions_async

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


async def test_a_leader_that_hears_nothing_new_knows_what_the_snapshot_says(house):
    run = house.create_run(batch_groups=1)
    with connect(house.url) as client:
        config = replace(read_revisions(client, run).last.config, batch_groups=3)
        revise_config(client, run, config, from_step=1)
    fold = RunFold(config)
    fold.apply("1-0", GroupOpened(group_id="g", prompt_uid="", num_samples=2))
    was_deleted, was_saved = asyncio.Event(), asyncio.Event()

    async with connect_async(house.url) as client:
        epoch = (await acquire_leadership(client, run, owner="p", lease_s=60)).epoch
        passed = encode_event(GroupOpened(group_id="passed", prompt_uid="", num_samples=2))
        await client.xadd(keys.run_keys(run).events, {"r": passed})
        revised = ConfigRevised(revision=2, step=1)
        await announce_revision(Term(client, run, epoch), revised)
        position = await last_event_id(client, run)
        known = PlannerSnapshot(
            position=position,
            step=3,
            manifest_hash="ab" * 32,
            next_row_id=7,
            fold=fold.snapshot(),
            versions={1: 1, 5: 3},
            lineage="other",
            config_revision=2,
            revised_at="1-1",
        )
        record = encode_snapshot(known)
        term = Term(client, run, epoch)
        await save_snapshot(term, position=position, step=3, record=record)

        async def delete_once(act: str) -> None:
            if act == "save_snapshot" and not was_deleted.is_set():
                await client.delete(keys.run_keys(run).snapshot)
                was_deleted.set()
            elif act == "trim_events":
                was_saved.set()

        assembler = Assembler(house.url, max_cache_bytes=1 << 20)
        frontier = await read_frontier_async(client, run)
        leader = Leader(
            term,
            RunView(client, run, frontier=frontier, on_stepped=lambda _: None),
            assembler,
            revisions=await read_revisions_async(client, run),
            upkeep=Upkeep(snapshot_events=0, before=delete_once),
        )
        await first_of(leader.lead(), was_saved.wait())
        again = await read_snapshot(client, run)
        await assembler.close()

    assert again == known


async def test_config_of_the_snapshot_chooses_groups_for_unplanned_steps_only(
    house,
):
    run = house.create_run(batch_groups=1, selection="oldest_weights")
    often = Upkeep(snapshot_steps=1)
    with connect(house.url) as client:
        config = replace(read_revisions(client, run).last.config, batch_groups=2)
        revise_config(client, run, config, from_step=2)
    first = await house.start_batcher(lease_s=0.5, upkeep=often)
    trainer = house.trainer(first, run)
    await house.publish(run, group("g0"), group("g1"), group("g2"))
    await trainer.start("a")
    await trainer.stepped(await trainer.get(1))
    await trainer.stepped(await trainer.get(2))
    await first.stop()
    await house.publish(run, group("g3"), group("g4"))
    with connect(house.url) as client:
        late: Any = client.xadd(keys.run_keys(run).events, {"r": encode_event(BatchDue(step=2))})

    await house.start_batcher(upkeep=often)

    async def planned():
        with connect(house.url) as client:
            return read_plan(client, run, 3)

    third = await wait_until_async(planned)
    assert third is not None
    manifest = third.manifest
    assert [each.group_id for each in manifest.groups] == ["g3", "g4"]
    assert event_position(manifest.last_event_id) > event_position(late.decode())
