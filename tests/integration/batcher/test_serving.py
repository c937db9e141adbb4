"""Waits for batches, and batches as ranks and observers get them."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

import testkit
from testkit import group, ids
from turnstream.batching.rows import minibatch
from turnstream.errors import BatcherUnavailableError, NotReadyError
from turnstream.generator import Publisher
from turnstream.store.client import keys
from turnstream.store.client.connection import connect, connect_async
from turnstream.store.run.configs import read_config_async
from turnstream.store.run.runs import newest_version
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream_server.batcher.assembly.shares import PlannedBatch
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.batcher.serving import running_calls
from turnstream_server.batcher.serving.servicer import BatchesServicer
from turnstream_server.ledger.core.frontier import read_frontier_async


class SlowClient:
    """A client whose replies are released one by one by the test."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self.waiting: list[asyncio.Event] = []

    async def execute_command(self, *words: Any) -> Any:
        """The reply, once its event is set."""
        reply = await self._client.execute_command(*words)
        self.waiting.append(asyncio.Event())
        await self.waiting[-1].wait()
        return reply

    async def has_replies(self, count: int) -> None:
        """Return when so many replies have come in all."""
        await testkit.wait_until_async(
            lambda: len(self.waiting) >= count, describe=f"{count} replies"
        )


@pytest.fixture
async def client(cluster) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect_async(cluster.url) as client:
        yield client


@pytest.fixture
async def slow(client) -> SlowClient:
    return SlowClient(client)


@pytest.fixture
async def view(cluster, client, slow) -> RunView:
    run = cluster.create_run()
    frontier = await read_frontier_async(client, run)
    return RunView(slow, run, frontier=frontier, on_stepped=lambda _: None)


async def test_reply_from_before_a_plan_does_not_hide_the_plan(view, slow, client):
    refreshing = asyncio.create_task(view.refresh())
    await slow.has_replies(1)

    await client.hset(keys.run_keys(view.run).frontier, "planned", 1)
    view.offer(_batch(view.run, step=1))
    slow.waiting[0].set()
    await slow.has_replies(2)
    planned_meanwhile = view.frontier.planned
    slow.waiting[1].set()
    frontier = await refreshing

    assert planned_meanwhile == 1
    assert frontier.planned == view.frontier.planned == 1


async def test_later_of_two_reads_wins(view, slow, client):
    early = asyncio.create_task(view.refresh())
    await slow.has_replies(1)
    await client.hset(keys.run_keys(view.run).frontier, "stepped", 5)
    late = asyncio.create_task(view.refresh())
    await slow.has_replies(2)

    slow.waiting[1].set()
    await late
    slow.waiting[0].set()

    assert (await early).stepped == 5
    assert view.frontier.stepped == 5


async def test_the_config_in_force_is_read_at_one_moment(view, slow, client):
    expected = await read_config_async(client, view.run)
    reading = asyncio.create_task(view.newest_config())
    await slow.has_replies(1)

    await client.delete(keys.run_keys(view.run).config)
    slow.waiting[0].set()

    assert await reading == expected


async def test_lost_revision_is_not_reported_as_a_missing_run(cluster, client):
    run = cluster.create_run()
    frontier = await read_frontier_async(client, run)
    view = RunView(client, run, frontier=frontier, on_stepped=lambda _: None)

    with pytest.raises(NotReadyError, match="config revision 7 is not there"):
        await view.config(7)


def _batch(run: str, *, step: int) -> PlannedBatch:
    manifest = dataclasses.replace(testkit.manifest(run=run), step=step)
    return PlannedBatch(manifest=manifest, manifest_hash="ab", config=testkit.config())


@pytest.mark.parametrize("ends", ["close", "mark_deleted"])
async def test_waiting_on_an_ended_view_does_not_spin(view, ends):
    getattr(view, ends)()

    started_s = asyncio.get_running_loop().time()
    has_changed = await view.wait_for_change(0.2)

    assert not has_changed
    assert asyncio.get_running_loop().time() - started_s > 0.15


async def test_a_wait_that_ends_has_its_reasons_for_programs_too(cluster):
    run, trainer = await cluster.serve(batch_groups=2)
    await trainer.start()
    with (
        Publisher(cluster.url, run, writer="gen-7") as publisher,
        publisher.trajectory("g0", 0, num_samples=1) as member,
    ):
        member.append(ids("ab"), ids("c"))
        error = await trainer.refused(1, words="0 of 2 groups ready, 1 open")
        member.abandon("over")

    first, second = error.reasons
    assert (first.kind, first.facts["needed"], first.facts["open"]) == ("too_few_ready", 2, 1)
    assert second.kind == "member_open"
    assert second.facts["writer"] == "gen-7"
    assert second.sentence.startswith("group g0 (0 of 1 members) waits for sample 0 of generator")


async def test_ranks_with_the_same_wait_share_one_read(cluster, monkeypatch):
    monkeypatch.setattr(running_calls, "_READ_EVERY_S", 600.0)
    run, trainer = await cluster.serve()
    await trainer.start()

    async def wait(wait_s):
        with pytest.raises(NotReadyError) as caught:
            await trainer.get(1, wait_s=wait_s)
        return caught.value.reasons

    with (
        Publisher(cluster.url, run) as publisher,
        publisher.trajectory("g0", 0, num_samples=1) as member,
    ):
        member.append(ids("ab"), ids("c"))
        found = await asyncio.gather(*[wait(0.05 * rank) for rank in range(8)])
        member.abandon("over")

    left_s = {reason.facts["lease_left_s"] for each in found for reason in each[1:]}
    assert [len(each) for each in found] == [2] * 8
    assert len(left_s) == 1


async def test_the_batcher_bounds_the_wait_that_a_call_asks_for(cluster):
    run = cluster.create_run()
    trainer = await cluster.start_trainer(run, wait_max_s=0.05)

    with pytest.raises(NotReadyError):
        await asyncio.wait_for(trainer.get(1, wait_s=1000), timeout=20)


async def test_replica_that_stops_refuses_waiting_calls(cluster):
    run = cluster.create_run()
    replica = await cluster.start_batcher()
    trainer = cluster.trainer(replica, run)
    await trainer.start()
    waiting = asyncio.create_task(trainer.get(1))
    with pytest.raises(NotReadyError):  # calls of one connection arrive in order
        await trainer.get(1, wait_s=0.05)

    await replica.stop()

    with pytest.raises(BatcherUnavailableError, match="this replica stops"):
        await waiting


async def test_unreadable_reasons_do_not_replace_the_error_of_a_wait(cluster):
    run, trainer = await cluster.serve(batch_groups=2)
    await trainer.start()
    cluster.client.zadd(keys.run_keys(run).refills, {"no trajectory": 1})

    error = await trainer.refused(1, words="^step 1: 0 steps are planned, 0 are stepped$")

    assert error.reasons == ()


async def test_reasons_of_former_runs_are_dropped(cluster):
    cache = running_calls.ReasonCache(cluster.url)

    found = [await cache.reasons(cluster.create_run()) for _ in range(5)]
    cache.close()

    assert all(found)
    assert not cache._reads


NUM_RANKS = 8


async def test_ranks_of_one_mini_batch_share_one_cut(cluster, monkeypatch):
    _, trainer = await cluster.started(
        group("g0"),
        group("g1"),
        batch_groups=2,
        mini_batch_groups=1,
        session="s",
        dp_world_size=NUM_RANKS,
    )
    num_cuts, balance = [], minibatch.balance

    def counted(weights, **options):
        num_cuts.append(options["num_parts"])
        return balance(weights, **options)

    monkeypatch.setattr(minibatch, "balance", counted)
    pulled = await asyncio.gather(*[trainer.get(1, dp_rank=rank) for rank in range(NUM_RANKS)])

    assert [len(share) for share in pulled] == [2] * NUM_RANKS
    assert num_cuts == [NUM_RANKS, NUM_RANKS]
    real = [share[index].mini_batch.info.num_real_rows for share in pulled for index in (0, 1)]
    assert sum(real) == 4


async def test_a_replica_that_is_behind_announces_in_the_lineage_of_the_store(cluster):
    run, trainer = await cluster.started(
        group("g1"), group("g2"), batch_groups=1, retain_checkpoints=5
    )
    tokens = [await trainer.stepped(await trainer.get(step)) for step in (1, 2)]

    async with connect_async(cluster.url) as client:
        before = await read_frontier_async(client, run)
        views = {run: RunView(client, run, frontier=before, on_stepped=lambda _: None)}
        await trainer.start("back", token=str(tokens[0]))
        request = wire.AnnounceVersionRequest(
            run=run, version=5, step=1, session_epoch=trainer.session_epoch
        )

        async def find(run: str) -> RunView:
            return views[run]

        await BatchesServicer(client, find).announce_version(request)

    with connect(cluster.url) as store:
        announced = newest_version(store, run)
    assert before.lineage == "main"
    assert announced is not None
    assert (announced.version, announced.lineage) == (5, "main-1")
