"""A run that gets another config at a step: planned, served and taken over by the right one."""

import asyncio
import dataclasses
from typing import Any

import pytest

from testkit import group, ids, wait_until_async
from testkit.scripts import script
from turnstream.generator import AsyncPublisher, Publisher
from turnstream.records.configs import encode_config
from turnstream.records.events import decode_event, encode_event
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.client.scripts import run_command
from turnstream.store.run.revisions import read_revisions, revise_config
from turnstream.types import ConfigRevised, GroupOpened
from turnstream_server.batcher.assembly.local import assemble_locally
from turnstream_server.batcher.planner.upkeep import Upkeep
from turnstream_server.bus.core.frontier import read_frontier

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

REVISED = {
    "estimator": "dr_grpo",
    "batch_groups": 2,
    "mini_batch_groups": 2,
    "max_tokens_per_micro_batch": 8,
    "group_deadline_s": 600,
    "deadline_policy": "train_short",
    "pad_token_id": 9,
}


async def revise(house, run, *, from_step, **changes):
    def store():
        with connect(house.url) as client:
            before = read_revisions(client, run).last.config
            after = dataclasses.replace(before, **changes)
            return revise_config(client, run, after, from_step=from_step)

    return await asyncio.to_thread(store)


async def planned(house, run, step):
    with connect(house.url) as client:

        async def is_planned():
            return read_frontier(client, run).planned >= step

        await wait_until_async(is_planned, describe=f"the plan of step {step}")


def names(pulled):
    return list(dict.fromkeys(pulled.mini_batch.rows.group_id))


def info(pulled):
    return pulled.mini_batch.info


async def test_a_step_is_planned_and_made_by_its_own_config(house):
    run = house.create_run(batch_groups=1, max_planned_ahead=0)
    trainer = house.trainer(await house.start_batcher(), run)
    await trainer.start()
    await house.publish(run, *(group(f"g{i}") for i in range(4)))

    number = await revise(house, run, from_step=2, **REVISED)
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


async def test_batches_of_before_come_again_as_they_were_after_a_rollback(house):
    run = house.create_run(batch_groups=1, max_planned_ahead=0)
    first = house.trainer(await house.start_batcher(), run)
    await first.start("first")
    await house.publish(run, *(group(f"g{i}") for i in range(5)))
    await revise(house, run, from_step=2, **REVISED)
    before = [await first.get(1)]
    await first.stepped(before[0])
    before.append(await first.get(2))
    await first.stepped(before[1])

    # Another replica, which has planned none of it, and a session that begins again.
    again = house.trainer(await house.start_batcher(), run)
    await again.start("again")
    after = []
    for step in (1, 2, 3):
        after.append(await again.get(step))
        await again.stepped(after[-1])

    assert [each[0].header for each in after[:2]] == [each[0].header for each in before]
    assert [info(each[0]).config_revision for each in after] == [1, 2, 2]


async def test_inspection_of_a_step_uses_the_config_of_that_step(house):
    run = house.create_run(batch_groups=1, max_planned_ahead=2)
    trainer = house.trainer(await house.start_batcher(), run)
    await trainer.start()
    await revise(house, run, from_step=2, **REVISED)
    await house.publish(run, *(group(f"g{i}") for i in range(3)))
    await planned(house, run, 2)

    for step in (1, 2):
        (pulled,) = await trainer.get(step)
        (seen,) = await asyncio.to_thread(
            assemble_locally, house.url, run, step, dp_rank=0, dp_world_size=1
        )
        assert seen.content_hash == pulled.header.content_hash


@pytest.mark.parametrize("upkeep", [Upkeep(), Upkeep(snapshot_events=1, snapshot_steps=1)])
async def test_a_successor_plans_on_by_the_revised_config(house, upkeep):
    run = house.create_run(batch_groups=1, max_planned_ahead=5)
    first = await house.start_batcher(upkeep=upkeep)
    await revise(house, run, from_step=2, **REVISED)
    await house.publish(run, *(group(f"g{i}") for i in range(4)))
    await planned(house, run, 2)
    await first.stop()

    trainer = house.trainer(await house.start_batcher(upkeep=upkeep), run)
    await house.publish(run, group("g4"))
    await trainer.start()
    pulled = [(await trainer.get(step))[0] for step in (1, 2, 3)]

    assert [info(each).config_revision for each in pulled] == [1, 2, 2]
    assert [names(each) for each in pulled] == [["g0"], ["g1", "g2"], ["g3", "g4"]]


async def test_leader_that_reads_its_successors_revision_does_not_report_a_missing_run(
    house, caplog
):
    # One that had slept through its lease did not know the number: it told its ranks that the run
    # was deleted, and took part in it no more.
    run = house.create_run(batch_groups=1, max_planned_ahead=5)
    trainer = house.trainer(await house.start_batcher(lease_s=0.6), run)
    await trainer.start()
    await house.publish(run, group("g0"))
    await planned(house, run, 1)
    waiting = asyncio.create_task(trainer.get(2))

    put_in_force_by_another(house, run, **REVISED)
    await house.publish(run, group("g1"), group("g2"))

    (pulled,) = await waiting
    assert info(pulled).config_revision == 2
    assert names(pulled) == ["g1", "g2"]
    assert "config revision 2 of run" in caplog.text
    assert "is gone from the store" not in caplog.text


def put_in_force_by_another(house, run, **changes):
    """A revision that is stored and announced at once, as this replica's leader never does it."""
    own = keys.run_keys(run)
    with connect(house.url) as client:
        after = dataclasses.replace(read_revisions(client, run).last.config, **changes)
        last_id = client.xinfo_stream(own.events)["last-generated-id"].decode()
        event_id = f"{int(last_id.partition('-')[0]) + 1}-0"
        fields: Any = {"2": encode_config(after), "from:2": 2, "at:2": event_id, "newest": 2}
        with client.pipeline(transaction=True) as pipeline:
            pipeline.hset(own.config, mapping=fields)
            event = encode_event(ConfigRevised(revision=2, step=2))
            pipeline.xadd(own.events, {"r": event}, id=event_id)
            pipeline.execute()


async def test_a_revision_whose_event_is_damaged_stays_where_it_was(house):
    # The leader that had put it in force went on; its successor planned by the config before, which
    # the store refused for ever.
    run = house.create_run(batch_groups=1, max_planned_ahead=5)
    first = await house.start_batcher()
    await revise(house, run, from_step=2, **REVISED)
    await house.publish(run, *(group(f"g{i}") for i in range(4)))
    await planned(house, run, 2)
    await first.stop()
    event_id = damage_revision(house, run)

    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, group("g4"))
    await trainer.start()
    pulled = [(await trainer.get(step))[0] for step in (1, 2, 3)]

    assert [info(each).config_revision for each in pulled] == [1, 2, 2]
    assert [names(each) for each in pulled] == [["g0"], ["g1", "g2"], ["g3", "g4"]]
    with connect(house.url) as client:
        kept: Any = client.xrange(keys.run_keys(run).damaged)
    assert [each for each, _ in kept] == [event_id]


def damage_revision(house, run):
    """Two wrong bytes in the event that put the revision in force; its id."""
    events = keys.run_keys(run).events
    with connect(house.url) as client:
        entries: Any = client.xrange(events)
        (damaged,) = [
            event_id
            for event_id, fields in entries
            if isinstance(decode_event(fields[b"r"]), ConfigRevised)
        ]
        client.delete(events)
        for event_id, fields in entries:
            if event_id == damaged:
                fields[b"r"] = fields[b"r"][:8] + bytes(2) + fields[b"r"][10:]
            client.xadd(events, fields, id=event_id)
    return damaged


async def test_plan_made_before_the_revision_of_its_step_is_repeated(house, caplog):
    run = house.create_run(batch_groups=1, max_planned_ahead=0)

    async def revise_now(manifest):
        if manifest.step == 1 and manifest.config_revision == 1:
            await revise(house, run, from_step=1, **REVISED)

    trainer = house.trainer(await house.start_batcher(before_write=revise_now), run)
    await trainer.start()
    await house.publish(run, group("g0"), group("g1"))
    (pulled,) = await trainer.get(1)

    assert info(pulled).config_revision == 2
    assert names(pulled) == ["g0", "g1"]
    assert "failed" not in caplog.text


async def test_groups_are_chosen_again_after_a_revision(house):
    run = house.create_run(batch_groups=1, max_planned_ahead=0, selection="in_order")

    async def revise_now(manifest):
        if manifest.step == 1 and manifest.config_revision == 1:
            await revise(house, run, from_step=1, **REVISED)

    replica = await house.start_batcher(before_write=revise_now)
    await house.publish(run, group("g0"), group("g1"), group("g2"))
    await planned(house, run, 1)
    await replica.stop()
    await house.publish(run, group("g3"))

    trainer = house.trainer(await house.start_batcher(), run)
    await trainer.start()
    (first,) = await trainer.get(1)
    await trainer.stepped([first])
    (second,) = await trainer.get(2)

    assert [names(each) for each in (first, second)] == [["g0", "g1"], ["g2", "g3"]]


async def test_a_deadline_that_comes_with_a_revision_ends_a_wait(house):
    run = house.create_run(batch_groups=1, max_planned_ahead=0)
    trainer = house.trainer(await house.start_batcher(), run)
    await trainer.start()

    with Publisher(house.url, run) as publisher, publisher.group("hangs", 3) as members:
        writers = [members.trajectory(sample) for sample in range(3)]
        for sample in range(2):
            writers[sample].append([1, 2], [3])
            writers[sample].seal(reward=float(sample))
        await asyncio.to_thread(publisher.flush)  # before the deadline is there
        await revise(house, run, from_step=1, group_deadline_s=0.3, deadline_policy="train_short")
        (pulled,) = await trainer.get(1)
        writers[2].abandon("too late")

    assert len(pulled.rows) == 2
    assert info(pulled).config_revision == 2


async def test_a_lease_that_is_revised_is_the_one_that_ends(house):
    run = house.create_run(batch_groups=1, max_planned_ahead=0, lease_s=600)
    await house.start_batcher()
    await revise(house, run, from_step=1, lease_s=0.4)
    with connect(house.url) as client:
        names_ = keys.run_keys(run)

        async def is_in_force():
            return client.hget(names_.config, "newest") == b"2"

        await wait_until_async(is_in_force, describe="the revision")
        client.hset(names_.config, "lease_floor", "1:1")  # as ten minutes later
        opened = encode_event(GroupOpened(group_id="gone", prompt_uid="", num_samples=1))
        command = script("open_group")(names_.of_open_group, "gone", 1, "w", opened, "gone/0/0")
        run_command(client, command)

        async def is_given_up():
            ended = b"abandoned:the lease of w ended"
            return client.hget(names_.ledger, "gone/0/0") == ended

        await wait_until_async(is_given_up, describe="the end of the lease")


async def test_revised_limit_of_open_groups_does_not_count_ready_ones(house):
    # Of a batch of three, two groups are complete before the bound, and one may be open.
    run = house.create_run(batch_groups=3, max_planned_ahead=0)
    trainer = house.trainer(await house.start_batcher(), run)
    await trainer.start()
    await house.publish(run, group("g0"), group("g1"))

    await revise(house, run, from_step=1, max_open_groups=1)
    await house.publish(run, group("g2"))
    (pulled,) = await trainer.get(1)

    assert names(pulled) == ["g0", "g1", "g2"]
    with connect(house.url) as client:
        assert read_frontier(client, run).num_open_groups == 0


async def test_a_shorter_lease_costs_a_living_publisher_nothing(house):
    # It heard of it with its next heartbeat, and was given up before.
    run = house.create_run(batch_groups=1, lease_s=30.0)
    await house.start_batcher()
    names = keys.run_keys(run)
    async with AsyncPublisher(house.url, run) as publisher:
        early = publisher.trajectory("early", 0, num_samples=1)
        await early.append(ids("ab"), ids("c"))
        with connect(house.url) as client:

            async def is_told():
                found: Any = client.zrange(names.leases, 0, -1, withscores=True)
                ((_, end),) = found
                return end

            before = await is_told()

            async def has_beaten():
                return await is_told() > before  # it beats every ten seconds from now on

            await wait_until_async(has_beaten, describe="the first heartbeat")
            number = await revise(house, run, from_step=1, lease_s=1.0)

            async def is_in_force():
                return client.hget(names.config, "newest") == b"%d" % number

            await wait_until_async(is_in_force, describe="the shorter lease")
            late = publisher.trajectory("late", 0, num_samples=1)
            await late.append(ids("ab"), ids("c"))
            await asyncio.sleep(4.0)  # four leases of the new length, the clock is steady

            for episode in (early, late):
                await episode.seal(1.0)
            entries: Any = client.hvals(names.ledger)
            assert [entry for entry in entries if b"abandoned" in entry] == []
