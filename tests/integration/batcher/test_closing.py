"""Closed, reopened and paused runs, and the end of a run."""

import asyncio

import pytest

from testkit import group, wait_until_async
from turnstream.errors import EndOfRunError
from turnstream.store.client import keys
from turnstream.store.run.credits import credit
from turnstream.store.run.runs import close_run, pause_run, reopen_run, resume_run
from turnstream.types import Purpose, TrajectoryState
from turnstream_server.ledger.core.frontier import read_frontier
from turnstream_server.ledger.queries.ledger import read_ledger
from turnstream_server.ledger.release.compact_records import past_reasons


@pytest.fixture
def client(cluster):
    return cluster.client


def names(pulled):
    return [name for each in pulled for name in dict.fromkeys(each.mini_batch.rows.group_id)]


async def trained(cluster, run, num_groups):
    """A trainer that took all whole batches of two, of a run that has more groups."""
    trainer = await cluster.start_trainer(run)
    await cluster.publish(run, *(group(f"g{i}") for i in range(num_groups)))
    for step in range(1, num_groups // 2 + 1):
        await trainer.stepped(await trainer.get(step))
    return trainer


async def test_dropped_leftover_ends_in_the_ledger_with_its_reason(cluster, client):
    run = cluster.create_run(batch_groups=2)
    trainer = await trained(cluster, run, 3)

    close_run(client, run, leftover="drop")
    with pytest.raises(EndOfRunError):
        await trainer.get(2)

    await wait_until_async(
        lambda: read_ledger(client, run).by_state[TrajectoryState.SURPLUS] == 2,
        describe="the end of what was left",
    )
    read_ledger(client, run).check()
    reason = b"surplus:left over when the run was closed"
    folded = dict(past_reasons(client, run))
    assert client.hget(keys.run_keys(run).ledger, "g2/0/0") == reason or folded


async def test_carried_leftover_is_planned_after_the_run_is_reopened(cluster, client):
    run = cluster.create_run(batch_groups=2)
    trainer = await trained(cluster, run, 3)

    close_run(client, run, leftover="carry")
    with pytest.raises(EndOfRunError):
        await trainer.get(2)
    kept = read_ledger(client, run).by_state[TrajectoryState.SEALED]
    reopen_run(client, run)
    await cluster.publish(run, group("late"))
    second = await trainer.get(2)

    assert kept == 2
    assert names(second) == ["g2", "late"]


@pytest.mark.parametrize(
    ("leftover", "num_left", "may_start"),
    [("short", 1, 4), ("short", 3, 4), ("carry", 1, 3), ("drop", 1, 4)],
)
async def test_a_run_that_is_reopened_takes_no_group_beyond_its_staleness(
    cluster, client, leftover, num_left, may_start
):
    run, trainer = await cluster.serve(batch_groups=4, max_staleness=0, max_planned_ahead=0)
    await trainer.start()
    found = []
    for cycle in range(2):
        await cluster.publish(run, *(group(f"{cycle}/{i}") for i in range(num_left)))
        close_run(client, run, leftover=leftover)
        await is_finished(client, run)
        if leftover == "short":
            await trainer.stepped(await trainer.get(cycle + 1))
        await wait_until_async(lambda: is_settled(client, run))
        reopen_run(client, run)
        found.append(credit(client, run).num_groups)

    assert found == [may_start, may_start - (leftover == "carry")]


async def is_settled(client, run):
    """Whether the ledger knows of what was dropped: nothing ready is left but what is kept."""
    leftover = client.hget(keys.run_keys(run).frontier, "leftover")
    return leftover != b"drop" or read_frontier(client, run).num_live_groups == 0


async def is_finished(client, run):
    await wait_until_async(lambda: read_frontier(client, run).is_finished, describe="the end")


async def test_a_closed_run_ends_by_the_leases_of_generators_that_are_dead(cluster, client):
    run = cluster.create_run(batch_groups=1, lease_s=0.4)
    cluster.open_group(run, "gone", "gone/0/0", num_samples=2)
    close_run(client, run)

    trainer = await cluster.start_trainer(run)
    with pytest.raises(EndOfRunError):
        await trainer.get(1)

    assert client.hget(keys.run_keys(run).groups, "gone") in (b"2:incomplete", None)


async def evaluation_ends(client, run):
    await wait_until_async(
        lambda: client.hget(keys.run_keys(run).groups, "e") in (b"2:evaluated", None),
        describe="the end of the evaluation",
    )


@pytest.mark.parametrize("leftover", ["short", "carry", "drop"])
async def test_no_end_waits_for_an_evaluation(cluster, client, leftover):
    run = cluster.create_run(batch_groups=2, lease_s=600)
    cluster.open_group(run, "e", "e/0/0", num_samples=2, purpose=Purpose.EVAL)
    await trained(cluster, run, 2)

    close_run(client, run, leftover=leftover)
    trainer = cluster.trainer(await cluster.start_batcher(), run)
    trainer.session_epoch = 1
    with pytest.raises(EndOfRunError):
        await trainer.get(2)

    assert client.hget(keys.run_keys(run).groups, "e") == b"2:evaluating"


async def test_evaluation_that_outlasts_its_run_is_ended_by_a_later_batcher(cluster, client):
    run = cluster.create_run(batch_groups=2, lease_s=0.4)
    first = await cluster.start_batcher()
    close_run(client, run)
    await is_finished(client, run)
    await first.stop()
    client.hset(keys.run_keys(run).frontier, "closed", 0)  # opened before the run was closed
    cluster.open_group(run, "e", "e/0/0", num_samples=2, purpose=Purpose.EVAL)
    client.hset(keys.run_keys(run).frontier, "closed", 1)

    await cluster.start_batcher()

    await evaluation_ends(client, run)


async def test_end_of_run_is_reported_once_the_last_batch_is_stepped(cluster):
    _, trainer = await cluster.started(group("g0"), closes=True, batch_groups=1)
    last = await trainer.get(1)

    waiting = asyncio.create_task(trainer.get(2))
    # Calls of one connection arrive in order.
    await trainer.refused(2, words="^step 2: 1 steps are planned, 0 are stepped; ")
    await trainer.stepped(last)

    with pytest.raises(EndOfRunError):
        await waiting


async def test_batcher_started_after_the_end_serves_a_call_for_the_run(cluster):
    run = cluster.create_run(batch_groups=1)
    replica = await cluster.start_batcher()
    first = cluster.trainer(replica, run)
    await cluster.publish(run, group("g0"), closes=True)
    await first.start("first")
    before = await first.get(1)
    await first.stepped(before)
    with pytest.raises(EndOfRunError):
        await first.get(2)
    await replica.stop()

    second = await cluster.start_trainer(run, session="second")
    after = await second.get(1)

    assert after[0].header == before[0].header


async def test_trainer_gets_planned_batches_and_then_the_pause(cluster, client):
    run, trainer = await cluster.serve(batch_groups=1, max_planned_ahead=0)
    await trainer.start()
    await cluster.publish(run, group("g0"), group("g1"))
    first = await trainer.get(1)

    pause_run(client, run, "maintenance")
    await trainer.stepped(first)
    again = await trainer.get(1)
    await trainer.refused(2, words="^step 2: .*; the run is paused: maintenance")
    waiting = asyncio.create_task(trainer.get(2))
    resume_run(client, run)
    (second,) = await waiting

    assert again[0].header == first[0].header
    assert second.mini_batch.info.step == 2
