"""A batcher finds new and reopened runs, and drops deleted ones; runs that are forks."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import testkit
from testkit import config, group, wait_until_async
from turnstream.errors import RunNotFoundError, StoreUnavailableError
from turnstream.store.client import keys
from turnstream.store.client.connection import connect, connect_async
from turnstream.store.run.runs import close_run, create_run, list_runs, reopen_run
from turnstream.types import RecoveryToken
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.batcher.serving.registry import RunDiscovery
from turnstream_server.ledger.admin.deletion import delete_run
from turnstream_server.ledger.admin.forks import fork_run
from turnstream_server.ledger.core.frontier import read_frontier
from turnstream_server.ledger.planning.manifests import read_plan
from turnstream_server.ledger.queries.ledger import read_ledger
from turnstream_server.loops import background

START = RecoveryToken(lineage="main", step=0, chain_hash="")


class Found(list[str]):
    """The reported runs, in order.

    Attributes:
        errors: raised for these runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.errors: dict[str, Exception] = {}

    async def add(self, run: str) -> None:
        """The callback of the discovery."""
        self.append(run)
        if run in self.errors:
            raise self.errors[run]

    async def has(self, *runs: str) -> None:
        """Return when these have been reported."""
        await wait_until_async(lambda: set(runs) <= set(self), describe=f"{runs} in {list(self)}")

    async def has_again(self, run: str) -> None:
        """Return when it has been reported twice."""
        await wait_until_async(
            lambda: self.count(run) >= 2, describe=f"{run} twice in {list(self)}"
        )


@pytest.fixture
def found() -> Found:
    return Found()


@pytest.fixture
async def discover(own_server, found) -> AsyncIterator[Callable[..., Awaitable[None]]]:
    """`discover(list_every_s=...)` finds the existing runs, and from then on new ones."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**options: float) -> None:
            client = await stack.enter_async_context(connect_async(own_server.url, num_retries=0))
            discovery = RunDiscovery(client, found.add, **options)
            await discovery.read_all()
            await stack.enter_async_context(background(discovery.follow(), name="discovery"))

        yield start


def create(client: Any, *runs: str) -> None:
    for run in runs:
        create_run(client, run, testkit.config())


async def is_planned(client: Any, run: str) -> None:
    await wait_until_async(
        lambda: read_frontier(client, run).planned > 0, describe=f"a batch of {run}"
    )


async def test_run_created_after_the_batcher_is_planned_without_a_call(cluster, client):
    await cluster.start_batcher()

    run = cluster.create_run(batch_groups=1)
    await cluster.publish(run, group("g0"))

    await is_planned(client, run)


async def test_reopened_run_is_planned_by_a_batcher_started_after_its_end(cluster, client):
    run = cluster.create_run(batch_groups=1)
    first = await cluster.start_batcher()
    close_run(client, run)

    await wait_until_async(lambda: read_frontier(client, run).is_finished)
    await first.stop()
    await cluster.start_batcher()

    reopen_run(client, run)
    await cluster.publish(run, group("g0"))

    await is_planned(client, run)


async def test_existing_and_new_runs_are_found(own_client, discover, found):
    create(own_client, "a/1", "b")

    await discover()
    at_first = list(found)
    create(own_client, "c d")
    fork_run(own_client, "b", "fork", START)

    await found.has("c d", "fork")
    assert at_first == ["a/1", "b"]
    assert len(found) == 4


async def test_more_new_runs_than_the_stream_keeps_are_all_found(own_client, discover, found):
    create(own_client, "known")
    await discover()
    many = [f"run {i}" for i in range(230)]

    with own_client.pipeline() as pipeline:  # at one moment, and the stream keeps the last half
        for run in ("known", *many):
            pipeline.sadd(keys.RUNS, keys.encode_name(run))
            pipeline.xadd(keys.NEWS, {"n": keys.encode_name(run)}, maxlen=115, approximate=False)
        pipeline.execute()

    await found.has(*many)
    await found.has_again("known")


async def test_every_run_is_found_again_after_an_error_of_the_store(
    own_client, discover, found, caplog
):
    caplog.set_level(logging.INFO, logger="turnstream_server.batcher")
    create(own_client, "known")
    await discover()
    own_client.set(keys.NEWS, "no stream")

    async def is_refused_twice() -> bool:
        refused = own_client.info("errorstats").get("errorstat_WRONGTYPE", {"count": 0})
        return refused["count"] >= 2

    await wait_until_async(is_refused_twice)
    own_client.sadd(keys.RUNS, "meanwhile")
    own_client.delete(keys.NEWS)
    create(own_client, "later")

    await found.has("meanwhile", "later")
    await found.has_again("known")
    assert [each.getMessage().partition(":")[0] for each in caplog.records] == [
        "new runs are not found"
    ]


async def test_unreadable_news_does_not_end_the_discovery(own_client, discover, found, caplog):
    create(own_client, "known")
    await discover()

    own_client.xadd(keys.NEWS, {"no": "name"})
    await found.has_again("known")
    create(own_client, "later")

    await found.has("later")
    assert "new runs are not found" in caplog.text


async def test_store_that_stops_answering_during_the_first_search_ends_the_start(
    own_client, discover, found
):
    create(own_client, "a", "b")
    found.errors["a"] = StoreUnavailableError("no answer")

    with pytest.raises(StoreUnavailableError):
        await discover()

    assert list(found) == ["a"]


async def test_unreadable_name_hides_no_other_run(own_client, discover, found, caplog):
    own_client.sadd(keys.RUNS, b"\xff", "", "a b", "x" * 2_000)
    create(own_client, "good")

    await discover()
    create(own_client, "later")

    await found.has("good", "later")
    refused = [each.getMessage() for each in caplog.records if "no name of a run" in each.message]
    assert len(refused) == 4
    assert "Traceback" not in caplog.text
    assert list_runs(own_client) == ["good", "later"]


async def test_run_that_cannot_be_opened_is_retried_and_hides_no_other(own_client, discover, found):
    found.errors["bad"] = ValueError()
    create(own_client, "bad", "good")

    await discover(list_every_s=0.1)

    assert list(found) == ["bad", "good"]
    found.clear()
    own_client.sadd(keys.RUNS, "silent")  # whose creator died
    await found.has("bad", "silent")


def keys_of(url: str, run: str) -> set[str]:
    """The last words of the keys of a run."""
    start = keys.run_keys(run).wake.removesuffix("}:wake")
    with connect(url) as client:
        found: Any = [
            *client.scan_iter(match=start + "}:*", count=1000),
            *client.scan_iter(match=start + "/*", count=1000),
        ]
    return {name.decode().rpartition(":")[2] for name in found}


async def test_waiting_calls_of_a_deleted_run_end_at_once(cluster):
    run, trainer = await cluster.serve()
    await trainer.start()
    getting = asyncio.create_task(trainer.get(1, wait_s=20))

    await wait_until_async(lambda: bool(cluster.client.hget(keys.run_keys(run).leader, "owner")))
    await asyncio.to_thread(delete_run, cluster.client, run)

    async with asyncio.timeout(15):
        with pytest.raises(RunNotFoundError):
            await getting


async def test_leader_and_follower_drop_a_deleted_run(cluster):
    run, other = cluster.create_run(batch_groups=1), cluster.create_run(batch_groups=1)
    replicas = [await cluster.start_batcher(lease_s=0.6) for _ in range(2)]
    trainers = [cluster.trainer(replica, run) for replica in replicas]
    await trainers[0].start()
    await cluster.publish(run, *(group(f"g{i}") for i in range(3)))
    await trainers[0].committed(await trainers[0].stepped(await trainers[0].get(1)))

    await asyncio.to_thread(delete_run, cluster.client, run)
    for trainer in trainers:
        trainer.session_epoch = 1
        with pytest.raises(RunNotFoundError):
            await trainer.get(2)
    with pytest.raises(RunNotFoundError):
        await trainers[1].start("again")

    going_on = cluster.trainer(replicas[1], other)
    await cluster.publish(other, group("g0"))
    await going_on.start()
    assert [pulled.rows for pulled in await going_on.get(1)]
    assert keys_of(cluster.url, run) == {"deleted", "wake", "meta", "incarnation"}


async def test_leader_of_a_deleted_run_plans_nothing_in_the_next_run(cluster):
    run, stalls, may_go_on = cluster.create_run(batch_groups=1), asyncio.Event(), asyncio.Event()

    async def stall(manifest: Any) -> None:
        if manifest.run == run:
            stalls.set()
            await may_go_on.wait()

    replica = await cluster.start_batcher(before_write=stall)
    await cluster.publish(run, group("old"))
    await stalls.wait()
    await asyncio.to_thread(delete_run, cluster.client, run)
    create_run(cluster.client, run, config(1))
    may_go_on.set()
    await cluster.publish(run, group("new"))

    trainer = cluster.trainer(replica, run)
    trainer.run = (await trainer.start()).run
    (pulled,) = await trainer.get(1)

    assert trainer.run == f"{run}~2"
    assert set(pulled.mini_batch.rows.group_id) == {"new"}
    assert pulled.mini_batch.info.run == f"{run}~2"
    assert not cluster.client.exists(keys.run_keys(run).plan, keys.run_keys(run).frontier)


SMALL = Upkeep(snapshot_events=1, snapshot_steps=1, compact_ended=2)


@pytest.mark.parametrize(("num_steps", "retained"), [(4, 2), (3, 1)])
async def test_the_oldest_checkpoint_can_be_forked_when_its_plan_is_gone(
    cluster, num_steps: int, retained: int
):
    run = cluster.create_run(batch_groups=1, retain_checkpoints=retained)
    new_run = f"{run} fork"
    replica = await cluster.start_batcher(upkeep=SMALL)
    trainer = cluster.trainer(replica, run)
    await trainer.start()
    await cluster.publish(run, *(group(f"g{i}") for i in range(num_steps)))
    *_, token = await trainer.train(1, 2, 3)
    await trainer.train(*range(4, num_steps + 1))
    frontier = keys.run_keys(run).frontier
    await wait_until_async(
        lambda: cluster.client.hget(frontier, "folded") == b"3", describe="3 folded steps"
    )
    plans = [read_plan(cluster.client, run, step) is not None for step in (3, 4)]

    fork_run(cluster.client, run, new_run, token)
    forked = cluster.trainer(replica, new_run)
    reply = await forked.start(token=str(token))
    await cluster.publish(new_run, group("g0"), group("g1"))
    pulled = [*await forked.get(4), *await forked.get(5)]

    rows = [int(row) for each in pulled for row in each.mini_batch.rows.row_id]
    assert plans == [False, num_steps == 4]
    assert (reply.next_step, reply.newest_version) == (4, -1)
    assert rows == list(range(rows[0], rows[0] + len(rows)))
    assert rows[0] == 6  # three batches of two rows
    assert {group_id for each in pulled for group_id in each.mini_batch.rows.group_id} == {
        *("g0", "g1"),
    }
    ledger = read_ledger(cluster.client, new_run)
    ledger.check()
    assert ledger.accepted == 10
