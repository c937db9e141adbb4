"""Sessions of trainers, their ranks, and stores that lose a plan."""

import asyncio
import logging

import pytest

import testkit
from testkit import group, wait_until_async
from turnstream.errors import (
    ConflictError,
    FencedError,
    NotReadyError,
    StoreBehindError,
)
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream_server.ledger.core.frontier import Rollback, read_frontier


async def test_a_get_asks_the_store_who_trains_and_not_its_own_memory(cluster):
    run, trainer = await cluster.started(group("g0"), batch_groups=1)
    await trainer.get(1)

    with connect(cluster.url) as client:  # a new session that this replica has not read yet
        client.hset(keys.run_keys(run).frontier, "session_epoch", 9)

    with pytest.raises(FencedError, match="trainer session 1 has ended, 9 has begun"):
        await trainer.get(1)


async def test_rank_whose_last_batch_is_missing_gets_its_name(cluster):
    run, trainer = await cluster.started(group("g0"), batch_groups=1, session="s")
    (first,) = await trainer.get(1, session="s")

    with pytest.raises(StoreBehindError, match=r"step 2 was delivered .* store is 1"):
        await trainer.get(3, previous_hash="0" * 64)
    await trainer.start("t")
    await trainer.stepped([first])
    await cluster.publish(run, group("g1"))
    with pytest.raises(FencedError, match='"lost" has ended or was lost, "t" has its epoch'):
        await trainer.get(2, session="lost")
    assert await trainer.get(2, previous_hash=first.mini_batch.info.manifest_hash)
    with pytest.raises(StoreBehindError, match=r"step 1 was delivered .* as step 1"):
        await trainer.get(2, previous_hash="0" * 64)


async def test_a_waiting_call_ends_when_another_session_begins_elsewhere(cluster):
    run = cluster.create_run(batch_groups=1)
    old = cluster.trainer(await cluster.start_batcher(), run)
    new = cluster.trainer(await cluster.start_batcher(), run)
    await old.start("old")
    waiting = asyncio.create_task(old.get(1))

    await new.start("new")

    with pytest.raises(FencedError):
        await waiting


async def test_checkpoint_of_a_missing_run_is_ahead_of_the_store(cluster):
    trainer = cluster.trainer(await cluster.start_batcher(), "lost")

    with pytest.raises(
        StoreBehindError, match="names step 7 of run 'lost', but this store has no run of that name"
    ):
        await trainer.start(token="v1:main:7:ab12")


async def test_stepped_and_uncommitted_batch_is_served_again_unchanged(cluster):
    run = cluster.create_run(batch_groups=1)
    replica = await cluster.start_batcher()
    first, second = cluster.trainer(replica, run), cluster.trainer(replica, run)
    await cluster.publish(run, group("g0"), group("g1"))
    await first.start("first")
    before = await first.get(1)
    await first.stepped(before)

    reply = await second.start("second")
    after = await second.get(1)

    assert reply.next_step == 1
    assert after[0].header.content_hash == before[0].header.content_hash
    assert len(after[0].header.content_hash) == 64  # SHA-256: the request is of an earlier release
    newer = await second.get(1, reads_xxh3=True)
    assert len(newer[0].header.content_hash) == 32
    testkit.assert_same(after[0].mini_batch, before[0].mini_batch)


async def test_going_back_is_logged_and_the_run_keeps_what_came_again(cluster, caplog):
    run = cluster.create_run(batch_groups=1, retain_checkpoints=5, max_staleness=9)
    replica = await cluster.start_batcher()
    trainer = cluster.trainer(replica, run)
    await cluster.publish(run, *(group(f"g{n}") for n in range(3)))
    await trainer.start("first")
    tokens = [await trainer.stepped(await trainer.get(step)) for step in (1, 2, 3)]
    await trainer.committed(tokens[1])
    caplog.set_level(logging.INFO)

    await cluster.trainer(replica, run).start("crashed", token=str(tokens[1]))
    of_crash = caplog.text
    caplog.clear()
    await cluster.trainer(replica, run).start("on purpose", token=str(tokens[0]))

    kept = read_frontier(cluster.client, run).rollbacks
    assert f"run {run}: steps [3] were not committed and come again" in of_crash
    assert "goes back" not in of_crash
    assert f"run {run} goes back behind committed step 2; steps [2] come again" in caplog.text
    assert kept == (Rollback("main-2", step=1, stepped=2), Rollback("main-1", step=2, stepped=3))


async def test_step_with_two_manifests_is_acknowledged_for_no_rank(cluster_at, own_server, past_of):
    cluster = cluster_at(own_server.url)
    run = cluster.create_run(batch_groups=1)
    trainer = cluster.trainer(await cluster.start_batcher(lease_s=1.0), run)
    await trainer.start("s", dp_world_size=2)
    past = past_of(own_server)
    await cluster.publish(run, group("lost"))
    (lost,) = await trainer.get(1, dp_rank=1)
    await asyncio.to_thread(past.come_back)
    await cluster.publish(run, group("other"))

    (other,) = await got(trainer, 1, dp_rank=0)

    assert (hash_of(lost), lost.rows) != (hash_of(other), other.rows)
    with pytest.raises(NotReadyError, match="dp_rank 1 has not stepped it"):
        await trainer.stepped([other])
    with pytest.raises(ConflictError, match="step 1 has the manifest"):
        await trainer.stepped([lost], dp_rank=1)
    waiting = asyncio.create_task(trainer.get(2, dp_rank=0, previous_hash=hash_of(other)))
    with pytest.raises(StoreBehindError, match=r"step 1 was delivered to dp_rank 1 .* as step 1"):
        await trainer.get(2, dp_rank=1, previous_hash=hash_of(lost))
    with pytest.raises(StoreBehindError, match="step 1 was delivered to dp_rank 1"):
        await waiting
    with pytest.raises(StoreBehindError, match="step 1 was delivered to dp_rank 1"):
        await trainer.stepped([other])
    await trainer.start("next", dp_world_size=2)
    again = [(await trainer.get(1, dp_rank=dp_rank))[0] for dp_rank in range(2)]
    with pytest.raises(NotReadyError, match="dp_rank 1 has not stepped it"):
        await trainer.stepped(again[:1])
    assert (await trainer.stepped(again[1:], dp_rank=1)).step == 1


async def test_rank_with_part_of_a_batch_gets_no_part_of_another(cluster):
    _, trainer = await cluster.started(group("g0"), batch_groups=1, session="s")

    (whole,) = await trainer.get(1)
    await trainer.get(1, manifest_hash=hash_of(whole))
    with pytest.raises(StoreBehindError, match="step 1 was delivered to dp_rank 0 from"):
        await trainer.get(1, manifest_hash="0" * 64)


async def test_batch_lost_while_a_rank_waits_ends_the_session(cluster_at, own_server, past_of):
    cluster = cluster_at(own_server.url)
    run = cluster.create_run(batch_groups=1, max_planned_ahead=0)
    replica = await cluster.start_batcher(lease_s=1.0)
    trainer, other = cluster.trainer(replica, run), cluster.trainer(replica, run)
    await trainer.start("s", dp_world_size=2)
    await other.start("s", dp_world_size=2)
    past = past_of(own_server)
    await cluster.publish(run, group("lost"))
    (lost,) = await trainer.get(1, dp_rank=1)
    waiting = asyncio.create_task(got(trainer, 2, dp_rank=1, previous_hash=hash_of(lost)))
    await asyncio.to_thread(past.come_back)

    with pytest.raises(StoreBehindError, match="step 1 was delivered to dp_rank 1"):
        await waiting
    with pytest.raises(StoreBehindError, match="step 1 was delivered to dp_rank 1"):
        await got(other, 1, dp_rank=0)


def hash_of(pulled):
    return pulled.mini_batch.info.manifest_hash


async def got(trainer, step, **asked):
    """Return the answer to a rank that asks again while the store restarts."""
    pulled = []

    async def gets():
        try:
            pulled[:] = await trainer.get(step, wait_s=1.0, **asked)
        except ConnectionError:
            return False
        return True

    await wait_until_async(gets, describe=f"step {step}")
    return pulled
