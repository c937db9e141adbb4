"""Which groups a leader plans, and which decisions it writes."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from testkit import group, trajectory, turn, wait_until_async
from turnstream.batching.fold.decisions import GroupCut, GroupDropped, MemberDropped
from turnstream.batching.merge.plan import Manifest
from turnstream.batching.planning.plan_batch import event_order
from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.connection import connect_async
from turnstream.store.run.configs import read_revisions, revise_config
from turnstream.types import BatchDue, Group, TrajectoryKey, TrajectoryState
from turnstream_server.batcher.planner import chain
from turnstream_server.batcher.planner.decisions import DecisionWriter
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.ledger.core.frontier import read_frontier
from turnstream_server.ledger.leadership.writes import Term, acquire_leadership
from turnstream_server.ledger.planning.manifests import read_plan
from turnstream_server.ledger.queries.ledger import read_ledger


@pytest.mark.parametrize("ahead", [0, 1, 2])
async def test_awaited_step_and_the_allowed_steps_ahead_are_planned(cluster, ahead):
    run, trainer = await cluster.started(
        *(group(f"g{i}") for i in range(4)), batch_groups=1, max_planned_ahead=ahead
    )

    await trainer.get(1 + ahead)
    await trainer.refused(
        2 + ahead, words=f"step {2 + ahead}: .*; step 1 is planned and not stepped"
    )

    assert read_frontier(cluster.client, run).planned == 1 + ahead


async def test_plan_overtaken_by_a_rollback_names_the_new_lineage(cluster, caplog):
    is_held, may_write = asyncio.Event(), asyncio.Event()

    async def hold(manifest: Manifest) -> None:
        if manifest.step == 3:
            is_held.set()
            await may_write.wait()

    run = cluster.create_run(batch_groups=1)
    trainer = cluster.trainer(await cluster.start_batcher(before_write=hold), run)
    await cluster.publish(run, group("g0"), group("g1"))
    await trainer.start("a")
    token = await trainer.stepped(await trainer.get(1))
    await trainer.stepped(await trainer.get(2))
    await cluster.publish(run, group("g2"))
    await is_held.wait()

    await trainer.start("back", token=str(token))
    may_write.set()
    (second,), (third,) = await trainer.get(2), await trainer.get(3)

    assert (second.mini_batch.info.lineage, third.mini_batch.info.lineage) == ("main", "main-1")
    assert third.mini_batch.rows.group_id == ["g2", "g2"]
    assert "failed" not in caplog.text


async def test_oddities_of_the_batches_are_logged_once(cluster, caplog):
    run, trainer = await cluster.serve(batch_groups=1)
    alone = [group(f"g{i}", trajectory(turn("ab", "CD"))) for i in range(2)]
    await trainer.start()

    await cluster.publish(run, *alone)
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


async def test_decisions_on_a_released_group_delay_no_other(cluster, caplog):
    gone = GroupDropped(group_id="gone", state=TrajectoryState.FILTERED, reason="why", keys=())
    late = MemberDropped(
        key=TrajectoryKey("gone", 2), state=TrajectoryState.SURPLUS, reason="too late"
    )
    cut = GroupCut(group_id="there", reason="enough")
    run = cluster.create_run()
    await cluster.publish(run, group("there"))
    async with connect_async(cluster.url) as client:
        leadership = await acquire_leadership(client, run, owner="p", lease_s=60)
        decisions = DecisionWriter(Term(client, run, leadership.epoch))

        assert await decisions.without_settled([late, gone, cut]) == [late, cut]
        await decisions.carry_out([gone, cut])

    assert cluster.client.hget(keys.run_keys(run).groups, "there") == b"2:decided"
    assert "cannot be settled: group gone is unknown, or finished" in caplog.text


def of_version(name: str, version: int) -> Group:
    members = [
        trajectory(turn("ab", "CD", version=version), sample=sample, reward=float(sample))
        for sample in range(2)
    ]
    return group(name, *members)


def names(pulled: Any) -> list[str]:
    return sorted(set(pulled.mini_batch.rows.group_id))


async def train(trainer: Any, step: int) -> Any:
    """Pull a step, acknowledge it and announce the version of that number."""
    pulled = await trainer.get(step)
    await trainer.stepped(pulled)
    await trainer.announce_version(step, step=step)
    return pulled[0]


async def test_groups_that_are_too_old_expire_and_free_capacity(cluster):
    run, trainer = await cluster.serve(batch_groups=1, max_staleness=1, max_age_policy="drop")
    await trainer.start()
    await trainer.announce_version(0, step=0)
    for step in (1, 2):
        await cluster.publish(run, of_version(f"g{step}", step - 1))
        await train(trainer, step)

    # Four groups may be live after step 2, and two of them are trained: these are more.
    await cluster.publish(run, *(of_version(f"late{i}", 0) for i in range(6)), of_version("new", 2))
    fresh = await train(trainer, 3)

    assert names(fresh) == ["new"]
    ledger = read_ledger(cluster.client, run)
    ledger.check()
    assert ledger.by_state[TrajectoryState.EXPIRED] == 12
    assert read_frontier(cluster.client, run).num_live_groups == 3


@pytest.mark.parametrize("is_led_anew", [False, True])
async def test_tokens_of_undone_weights_age_from_the_rollback_step(cluster, is_led_anew):
    run = cluster.create_run(
        batch_groups=1, max_staleness=2, max_age_policy="drop", retain_checkpoints=5
    )
    replica = await cluster.start_batcher()
    trainer = cluster.trainer(replica, run)
    await trainer.start()
    tokens = []
    for step in range(1, 5):
        await cluster.publish(run, of_version(f"g{step}", step - 1))
        tokens.append(await trainer.stepped(await trainer.get(step)))
        await trainer.committed(tokens[-1])
    await trainer.announce_version(4, step=4)

    await trainer.start("back", token=str(tokens[0]))
    for step in (2, 3, 4):
        await trainer.stepped(await trainer.get(step))
    if is_led_anew:
        await replica.stop()
        trainer = cluster.trainer(await cluster.start_batcher(), run)
        trainer.session_epoch = 2
    await cluster.publish(run, of_version("undone", 4), of_version("new", 5))
    (fresh,) = await trainer.get(5)

    assert names(fresh) == ["new"]


async def test_config_of_the_snapshot_chooses_groups_for_unplanned_steps_only(
    cluster,
):
    run = cluster.create_run(batch_groups=1, selection="oldest_weights")
    often = Upkeep(snapshot_steps=1)
    config = replace(read_revisions(cluster.client, run).last.config, batch_groups=2)
    revise_config(cluster.client, run, config, from_step=2)
    first = await cluster.start_batcher(lease_s=0.5, upkeep=often)
    trainer = cluster.trainer(first, run)
    await cluster.publish(run, group("g0"), group("g1"), group("g2"))
    await trainer.start("a")
    await trainer.stepped(await trainer.get(1))
    await trainer.stepped(await trainer.get(2))
    await first.stop()
    await cluster.publish(run, group("g3"), group("g4"))
    late: Any = cluster.client.xadd(
        keys.run_keys(run).events, {"r": encode_event(BatchDue(step=2))}
    )

    await cluster.start_batcher(upkeep=often)

    async def planned():
        return read_plan(cluster.client, run, 3)

    third = await wait_until_async(planned)
    assert third is not None
    manifest = third.manifest
    assert [each.group_id for each in manifest.groups] == ["g3", "g4"]
    assert event_order(manifest.last_event_id) > event_order(late.decode())
