"""Trainers, observers and operators around a withdrawal: refusals and continuations."""

import logging
from typing import Any

import pytest

from testkit import group, wait_until_async
from turnstream.errors import (
    ConflictError,
    CorruptRecordError,
    FencedError,
    StoreBehindError,
)
from turnstream.store.client import keys
from turnstream.types import TrajectoryState
from turnstream_server.batcher.planner import replanning
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.console.summary import RunHistory


async def test_session_ends_and_the_next_continues_after_the_stepped_steps(
    cluster, replan, caplog, store, of_3
):
    run, trainer = await cluster.started(
        group("g0"), of_3("g1"), group("g2"), batch_groups=1, session="a"
    )
    first = await trainer.get(1)
    token = await trainer.stepped(first)
    await trainer.committed(token)
    old = await trainer.get(2)
    await wait_until_async(lambda: store.planned(run) == 3)
    cluster.damage(run, "g0/0/0")
    before = store.digest(run)
    with pytest.raises(ConflictError, match="no payload after step 1 is damaged"):
        await replan(run)
    assert store.digest(run) == before
    cluster.damage(run, "g1/2/0")

    with caplog.at_level(logging.WARNING):
        done = await replan(run)
    with pytest.raises(FencedError, match="plans were withdrawn"):
        await trainer.get(2)
    with pytest.raises(FencedError, match="plans were withdrawn"):
        await trainer.get(9, previous_hash=old[0].mini_batch.info.manifest_hash)
    with pytest.raises(FencedError):
        await trainer.stepped(old)
    with pytest.raises(FencedError):
        await trainer.start("a", token=str(token))
    await trainer.start("b", token=str(token))
    second = await trainer.get(2)
    await trainer.stepped(second)
    third = await trainer.get(3)
    await trainer.stepped(third)

    assert done == "steps 2 to 3; damaged trajectories: 1"
    assert f"plans are withdrawn: {done}" in caplog.text
    trained = [each.mini_batch.rows for each in (*first, *second, *third)]
    assert [rows.trajectory_id for rows in trained] == [
        ["g0/0/0", "g0/1/0"],
        ["g1/0/0", "g1/1/0"],
        ["g2/0/0", "g2/1/0"],
    ]
    ids = [row_id for rows in trained for row_id in rows.row_id]
    assert ids == list(range(6))
    assert store.chain(run) == [1, 2, 3]
    assert cluster.states(run)[TrajectoryState.DEAD] == 1


async def test_damaged_plan_itself_is_not_withdrawn_and_the_run_continues(cluster, replan, store):
    # More steps than a replica keeps plans of: the first is read from the store again.
    num_steps = 10
    run, trainer = await cluster.serve(batch_groups=1, max_planned_ahead=num_steps)
    await cluster.publish(run, *[group(f"g{number}") for number in range(num_steps)])
    await wait_until_async(lambda: store.planned(run) == num_steps)
    plan = keys.run_keys(run).plan
    entries: Any = cluster.client.xrange(plan)
    cluster.client.delete(plan)
    for entry_id, fields in entries:
        record = bytearray(fields[b"r"])
        record[-9] ^= entry_id == b"1-0"
        cluster.client.xadd(plan, {"r": bytes(record)}, id=entry_id)

    with pytest.raises(ConflictError, match="the checksum of a manifest record"):
        await replan(run)
    await cluster.publish(run, group("g10"))
    await trainer.start("a")
    (last,) = await trainer.get(num_steps + 1)

    assert last.mini_batch.rows.group_id == ["g10", "g10"]


async def test_continuing_from_a_withdrawn_plan_is_refused_by_its_hash(
    cluster, replan, store, of_3
):
    run, trainer = await cluster.started(of_3("g0"), group("g1"), batch_groups=1, session="a")
    seen = (await trainer.get(1))[0].mini_batch.info.manifest_hash
    await trainer.get(2)
    await store.observe(run, seen_step=2)
    cluster.damage(run, "g0/1/0")

    await replan(run)
    await wait_until_async(lambda: store.planned(run) == 2)

    with pytest.raises(StoreBehindError, match="step 1 was delivered from the manifest"):
        await trainer.get(2, observer="eyes", previous_hash=seen)
    assert await store.observe(run, seen_step=0) == 1


async def test_a_step_that_comes_back_after_a_rollback_may_be_planned_again(
    cluster, replan, store, of_3
):
    run, trainer = await cluster.started(
        group("g0"), of_3("g1"), group("g2"), group("g3"), batch_groups=1, session="a"
    )
    token = await trainer.stepped(await trainer.get(1))
    await trainer.committed(token)
    lost = await trainer.stepped(await trainer.get(2))
    await wait_until_async(lambda: store.planned(run) == 4)
    await trainer.start("b", token=str(token))
    cluster.damage(run, "g1/0/0")

    done = await replan(run)
    with pytest.raises(StoreBehindError):
        await trainer.start("c", token=str(lost))
    await trainer.start("d", token=str(token))
    for step in (2, 3, 4):
        await trainer.stepped(await trainer.get(step))

    assert done.startswith("steps 2 to 4;")
    assert store.chain(run) == [1, 2, 3, 4]
    assert cluster.states(run) == {
        TrajectoryState.COMMITTED: 2,
        TrajectoryState.STEPPED: 6,
        TrajectoryState.DEAD: 1,
    }


async def test_rank_and_operator_get_the_damage_and_the_command(cluster, replan, monkeypatch, of_3):
    run = cluster.create_run(batch_groups=1)
    planner = cluster.trainer(await cluster.start_batcher(), run)
    await cluster.publish(run, of_3("g0"))
    await planner.start("a")
    await planner.get(1)
    other = cluster.trainer(
        await cluster.start_batcher(), run
    )  # the first one leads, and keeps rows
    cluster.damage(run, "g0/1/0")
    other.session_epoch = planner.session_epoch

    with pytest.raises(CorruptRecordError, match=f"g0/1/0: .*`turnstream run replan '{run}'`"):
        await other.get(1)
    why = cluster.why(run)
    with monkeypatch.context() as small:
        small.setattr(replanning, "MAX_WITHDRAWN", 2)
        with pytest.raises(ConflictError, match=r"3 traj.* from step 1 on.*at most 2 .*fork"):
            await replan(run)
    await replan(run)

    assert "step 1: damaged payload of g0/1/0: the checksum" in why
    assert f"`turnstream run replan '{run}'`" in why
    assert "damaged" not in cluster.why(run)


async def test_observer_keeps_released_steps_and_drops_withdrawn_ones(cluster, replan, store, of_3):
    run = cluster.create_run(batch_groups=1, retain_checkpoints=1)
    trainer = cluster.trainer(await cluster.start_batcher(upkeep=Upkeep(snapshot_steps=1)), run)
    await cluster.publish(run, of_3("g0"), group("g1"))
    await trainer.start("a")
    first = await trainer.get(1)
    history = RunHistory(cluster.client, run)
    history.summary()
    await trainer.committed(await trainer.stepped(first))
    await cluster.publish(run, of_3("g2"))
    plan = keys.run_keys(run).plan
    await wait_until_async(lambda: store.planned(run) == 3 and cluster.client.xlen(plan) == 2)
    before = history.summary()
    cluster.damage(run, "g1/0/0")

    await replan(run)
    await wait_until_async(lambda: store.planned(run) == 2)
    after = history.summary()

    assert [(seen.batches, seen.sequences) for seen in (before, after)] == [(3, 3), (2, 3)]
