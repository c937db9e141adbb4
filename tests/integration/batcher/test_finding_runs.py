"""A batcher finds the runs that are made, or opened again, while it serves."""

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import testkit
from testkit import group, wait_until_async
from turnstream.errors import StoreUnavailableError
from turnstream.store.client import keys
from turnstream.store.client.connection import connect_async
from turnstream.store.run.runs import close_run, create_run, reopen_run
from turnstream.types import RecoveryToken
from turnstream_server.batcher.planner.event_loop import background
from turnstream_server.batcher.serving.registry import RunDiscovery
from turnstream_server.bus.admin.forks import fork_run
from turnstream_server.bus.core.frontier import read_frontier

START = RecoveryToken(lineage="main", step=0, chain_hash="")


class Met(list[str]):
    """The runs that a finder has met, in order.

    Attributes:
        defects: runs that cannot be met.
        is_store_away: whether none can, for the store does not answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.defects: set[str] = set()
        self.is_store_away = False

    async def meet(self, run: str) -> None:
        """The callback of a finder."""
        self.append(run)
        if self.is_store_away:
            raise StoreUnavailableError("no answer")
        if run in self.defects:
            raise ValueError(run)

    async def has(self, *runs: str) -> None:
        """Return when these have been met."""
        await wait_until_async(lambda: set(runs) <= set(self), describe=f"{runs} in {list(self)}")

    async def has_again(self, run: str) -> None:
        """Return when it has been met twice."""
        await wait_until_async(
            lambda: self.count(run) >= 2, describe=f"{run} twice in {list(self)}"
        )


@pytest.fixture
def met() -> Met:
    return Met()


@pytest.fixture
async def start_finder(own_server, met) -> AsyncIterator[Callable[..., Awaitable[None]]]:
    """`start_finder(list_every_s=...)` finds the existing runs, and from then on new ones."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**options: float) -> None:
            client = await stack.enter_async_context(connect_async(own_server.url, num_retries=0))
            finder = RunDiscovery(client, met.meet, **options)
            await finder.read_all()
            await stack.enter_async_context(background(finder.follow(), name="discovery"))

        yield start


def create(client: Any, *runs: str) -> None:
    for run in runs:
        create_run(client, run, testkit.config())


async def is_planned(client: Any, run: str) -> None:
    await wait_until_async(
        lambda: read_frontier(client, run).planned > 0, describe=f"a batch of {run}"
    )


async def test_run_created_after_the_batcher_is_planned_without_a_call(house, client):
    await house.start_batcher()

    run = house.create_run(batch_groups=1)
    await house.publish(run, group("g0"))

    await is_planned(client, run)


async def test_reopened_run_is_planned_by_a_batcher_started_after_its_end(house, client):
    run = house.create_run(batch_groups=1)
    first = await house.start_batcher()
    close_run(client, run)

    await wait_until_async(lambda: read_frontier(client, run).is_finished)
    await first.stop()
    await house.start_batcher()

    reopen_run(client, run)
    await house.publish(run, group("g0"))

    await is_planned(client, run)


async def test_existing_and_new_runs_are_found(own_client, start_finder, met):
    create(own_client, "a/1", "b")

    await start_finder()
    at_first = list(met)
    create(own_client, "c d")
    fork_run(own_client, "b", "fork", START)

    await met.has("c d", "fork")
    assert at_first == ["a/1", "b"]
    assert len(met) == 4


async def test_run_whose_creator_died_is_found_in_the_list(own_client, start_finder, met):
    create(own_client, "before")
    await start_finder(list_every_s=0.1)

    own_client.sadd(keys.RUNS, "silent")

    await met.has("silent")
    assert list(met) == ["before", "silent"]


async def test_more_new_runs_than_the_stream_keeps_are_all_found(own_client, start_finder, met):
    create(own_client, "known")
    await start_finder()
    many = [f"run {i}" for i in range(230)]

    with own_client.pipeline() as pipeline:  # at one moment, and the stream keeps the last half
        for run in ("known", *many):
            pipeline.sadd(keys.RUNS, keys.encode_name(run))
            pipeline.xadd(keys.NEWS, {"n": keys.encode_name(run)}, maxlen=115, approximate=False)
        pipeline.execute()

    await met.has(*many)
    await met.has_again("known")


async def test_every_run_is_found_again_after_an_error_of_the_store(
    own_client, start_finder, met, caplog
):
    caplog.set_level(logging.INFO, logger="turnstream_server.batcher")
    create(own_client, "known")
    await start_finder()
    own_client.set(keys.NEWS, "no stream")

    async def is_refused_twice() -> bool:
        refused = own_client.info("errorstats").get("errorstat_WRONGTYPE", {"count": 0})
        return refused["count"] >= 2

    await wait_until_async(is_refused_twice)
    own_client.sadd(keys.RUNS, "meanwhile")
    own_client.delete(keys.NEWS)
    create(own_client, "later")

    await met.has("meanwhile", "later")
    await met.has_again("known")
    assert [each.getMessage().partition(":")[0] for each in caplog.records] == [
        "new runs are not found"
    ]


async def test_store_that_stops_answering_during_the_first_search_ends_the_start(
    own_client, start_finder, met
):
    create(own_client, "a", "b")
    met.is_store_away = True

    with pytest.raises(StoreUnavailableError):
        await start_finder()

    assert list(met) == ["a"]


async def test_unreadable_name_hides_no_other_run(own_client, start_finder, met, caplog):
    own_client.sadd(keys.RUNS, b"\xff")
    create(own_client, "good")

    await start_finder()
    create(own_client, "later")

    await met.has("good", "later")
    assert r"run \xff is skipped for now" in caplog.text


async def test_run_that_cannot_be_opened_is_retried_and_hides_no_other(
    own_client, start_finder, met
):
    met.defects.add("bad")
    create(own_client, "bad", "good")

    await start_finder(list_every_s=0.1)

    assert list(met) == ["bad", "good"]
    met.clear()
    await met.has("bad")
