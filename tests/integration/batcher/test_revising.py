"""A run that gets another config at a step: planned, served and taken over by the right one."""

import asyncio
import dataclasses
from typing import Any

import pytest

from testkit import group, ids, wait_until_async
from turnstream.generator import AsyncPublisher
from turnstream.records.configs import encode_config
from turnstream.records.events import decode_event, encode_event
from turnstream.store.client import keys
from turnstream.store.run.configs import read_revisions, revise_config
from turnstream.types import ConfigRevised
from turnstream_server.batcher.planner.snapshotting import Upkeep

REVISED = {
    "estimator": "dr_grpo",
    "batch_groups": 2,
    "mini_batch_groups": 2,
    "max_tokens_per_micro_batch": 8,
    "group_deadline_s": 600,
    "deadline_policy": "train_short",
    "pad_token_id": 9,
}


async def revise(cluster, run, *, from_step, **changes):
    def store():
        before = read_revisions(cluster.client, run).last.config
        after = dataclasses.replace(before, **changes)
        return revise_config(cluster.client, run, after, from_step=from_step)

    return await asyncio.to_thread(store)


def names(pulled):
    return list(dict.fromkeys(pulled.mini_batch.rows.group_id))


def info(pulled):
    return pulled.mini_batch.info


async def test_a_step_is_planned_and_made_by_its_own_config(cluster):
    run, trainer = await cluster.serve(batch_groups=1, max_planned_ahead=0)
    await trainer.start()
    await cluster.publish(run, *(group(f"g{i}") for i in range(4)))

    number = await revise(cluster, run, from_step=2, **REVISED)
    (first,) = await trainer.get(1)
    await trainer.stepped([first])
    (second,) = await trainer.get(2)

    assert number == 2
    assert [info(each).config_revision for each in (first, second)] == [1, 2]
    assert [names(each) for each in (first, second)] == [["g0"], ["g1", "g2"]]
    assert [info(each).pad_token_id for each in (first, second)] == [0, 9]
    assert [len(info(each).micro_batches) for each in (first, second)] == [1, 2]
    advantages = [sorted(set(each.mini_batch.rows.advantage.tolist())) for each in (first, second)]
    assert advantages[0] == pytest.approx([-0.7071, 0.7071], abs=1e-3)
    assert advantages[1] == [-0.5, 0.5]


@pytest.mark.parametrize("is_damaged", [False, True])
@pytest.mark.parametrize("upkeep", [Upkeep(), Upkeep(snapshot_events=1, snapshot_steps=1)])
async def test_successor_plans_by_the_revised_config_also_if_its_event_is_damaged(
    cluster, upkeep, is_damaged
):
    run = cluster.create_run(batch_groups=1, max_planned_ahead=5)
    first = await cluster.start_batcher(upkeep=upkeep)
    await revise(cluster, run, from_step=2, **REVISED)
    await cluster.publish(run, *(group(f"g{i}") for i in range(4)))
    await cluster.planned(run, 2)
    await first.stop()
    if is_damaged:
        cluster.change_records(keys.run_keys(run).events, damage_revision)

    trainer = cluster.trainer(await cluster.start_batcher(upkeep=upkeep), run)
    await cluster.publish(run, group("g4"))
    await trainer.start()
    pulled = [(await trainer.get(step))[0] for step in (1, 2, 3)]

    assert [info(each).config_revision for each in pulled] == [1, 2, 2]
    assert [names(each) for each in pulled] == [["g0"], ["g1", "g2"], ["g3", "g4"]]


async def test_leader_that_reads_its_successors_revision_rejects_no_event(cluster, caplog):
    run = cluster.create_run(batch_groups=1, max_planned_ahead=5)
    trainer = await cluster.start_trainer(run, lease_s=0.6)
    await cluster.publish(run, group("g0"))
    await cluster.planned(run, 1)
    waiting = asyncio.create_task(trainer.get(2))

    put_in_force_by_another(cluster, run, **REVISED)
    await cluster.publish(run, group("g1"), group("g2"))

    (pulled,) = await waiting
    assert info(pulled).config_revision == 2
    assert names(pulled) == ["g1", "g2"]
    assert "is gone from the store" not in caplog.text
    assert "rejected" not in caplog.text
    assert cluster.client.xlen(keys.run_keys(run).damaged) == 0


def put_in_force_by_another(cluster, run, **changes):
    """A revision that is stored and announced at once, as this replica's leader never does it."""
    own = keys.run_keys(run)
    after = dataclasses.replace(read_revisions(cluster.client, run).last.config, **changes)
    last_id = cluster.client.xinfo_stream(own.events)["last-generated-id"].decode()
    event_id = f"{int(last_id.partition('-')[0]) + 1}-0"
    fields: Any = {"2": encode_config(after), "from:2": 2, "at:2": event_id, "newest": 2}
    with cluster.client.pipeline(transaction=True) as pipeline:
        pipeline.hset(own.config, mapping=fields)
        event = encode_event(ConfigRevised(revision=2, step=2))
        pipeline.xadd(own.events, {"r": event}, id=event_id)
        pipeline.execute()


def damage_revision(records):
    """Return the events with two wrong bytes in each revision."""
    return [
        each[:8] + bytes(2) + each[10:] if isinstance(decode_event(each), ConfigRevised) else each
        for each in records
    ]


async def test_plan_made_before_the_revision_of_its_step_is_repeated(cluster, caplog):
    run = cluster.create_run(batch_groups=1, max_planned_ahead=0)

    async def revise_now(manifest):
        if manifest.step == 1 and manifest.config_revision == 1:
            await revise(cluster, run, from_step=1, **REVISED)

    trainer = await cluster.start_trainer(run, before_write=revise_now)
    await cluster.publish(run, group("g0"), group("g1"))
    (pulled,) = await trainer.get(1)

    assert info(pulled).config_revision == 2
    assert names(pulled) == ["g0", "g1"]
    assert "failed" not in caplog.text


async def test_a_shorter_lease_costs_a_living_publisher_nothing(cluster):
    run = cluster.create_run(batch_groups=1, lease_s=30.0)
    await cluster.start_batcher()
    names = keys.run_keys(run)
    async with AsyncPublisher(cluster.url, run) as publisher:
        early = publisher.trajectory("early", 0, num_samples=1)
        await early.append(ids("ab"), ids("c"))

        async def is_told():
            found: Any = cluster.client.zrange(names.leases, 0, -1, withscores=True)
            ((_, end),) = found
            return end

        before = await is_told()

        async def has_beaten():
            return await is_told() > before  # it beats every ten seconds from now on

        await wait_until_async(has_beaten, describe="the first heartbeat")
        number = await revise(cluster, run, from_step=1, lease_s=1.0)

        await wait_until_async(
            lambda: cluster.client.hget(names.config, "newest") == b"%d" % number,
            describe="the shorter lease",
        )
        late = publisher.trajectory("late", 0, num_samples=1)
        await late.append(ids("ab"), ids("c"))
        await asyncio.sleep(4.0)  # four leases of the new length, the clock is steady

        for episode in (early, late):
            await episode.seal(1.0)
        entries: Any = cluster.client.hvals(names.ledger)
        assert [entry for entry in entries if b"abandoned" in entry] == []
