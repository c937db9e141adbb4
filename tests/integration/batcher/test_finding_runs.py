"""A batcher finds the runs that are made, or opened again, while it serves."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

import testkit
from testkit import group, wait_until_async
from turnstream.errors import StoreUnavailableError
from turnstream.store.client import keys
from turnstream.store.run.runs import close_run, create_run, reopen_run
from turnstream.types import RecoveryToken
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.batcher.serving import run_discovery as search
from turnstream_server.batcher.serving.run_discovery import RunFinder
from turnstream_server.bus.admin.deletion import delete_run
from turnstream_server.bus.admin.forks import fork_run
from turnstream_server.bus.core.frontier import read_frontier

pytestmark = [pytest.mark.redis]

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

        async def are_met() -> bool:
            return set(runs) <= set(self)

        await wait_until_async(are_met, describe=f"{runs} in {list(self)}")

    async def has_again(self, run: str) -> None:
        """Return when it has been met twice."""

        async def is_met_twice() -> bool:
            return self.count(run) >= 2

        await wait_until_async(is_met_twice, describe=f"{run} twice in {list(self)}")


@pytest.fixture
def met() -> Met:
    return Met()


@pytest.fixture
async def finder(own_server, met) -> AsyncIterator[RunFinder]:
    finder = RunFinder(own_server.url, met.meet)
    yield finder
    await finder.close()


@pytest.fixture
async def counting(own_server, met) -> AsyncIterator[RunFinder]:
    """One that looks at the number of runs all the time."""
    finder = RunFinder(own_server.url, met.meet, count_every_s=0.1)
    yield finder
    await finder.close()


def create(client: Any, *runs: str) -> None:
    for run in runs:
        create_run(client, run, testkit.config())


async def is_planned(client: Any, run: str) -> None:
    async def has_batch() -> bool:
        return read_frontier(client, run).planned > 0

    await wait_until_async(has_batch, describe=f"a batch of {run}")


def is_counted(client: Any) -> bool:
    """Whether a finder has looked at the number of runs, which finds late what it missed."""
    return "cmdstat_scard" in client.info("commandstats")


async def test_run_created_after_the_batcher_is_planned_without_a_call(house, client):
    # A batcher looked for runs at its start only: until a trainer named it, a new run had no
    # leader, and so no deadline, no result of an evaluation and no batch.
    await house.start_batcher()

    run = house.create_run(batch_groups=1)
    await house.publish(run, group("g0"))

    await is_planned(client, run)


async def test_reopened_run_is_planned_by_a_batcher_started_after_its_end(house, client):
    run = house.create_run(batch_groups=1)
    first = await house.start_batcher()
    close_run(client, run)

    async def is_finished() -> bool:
        return read_frontier(client, run).is_finished

    await wait_until_async(is_finished)
    await first.stop()
    await house.start_batcher()

    reopen_run(client, run)
    await house.publish(run, group("g0"))

    await is_planned(client, run)


async def test_nothing_is_kept_of_a_run_that_is_deleted(house, client, caplog):
    caplog.set_level(logging.CRITICAL)  # a record that is kept keeps its error, and that its frames
    await house.start_batcher()
    run = house.create_run()

    def views() -> list[RunView]:
        gc.collect()
        return [each for each in gc.get_objects() if type(each) is RunView and each.run == run]

    async def is_found() -> bool:
        return len(views()) == 1

    async def is_forgotten() -> bool:
        return not views()

    await wait_until_async(is_found)
    delete_run(client, run)

    await wait_until_async(is_forgotten)


async def test_runs_that_are_there_and_runs_that_are_made_later_are_met(own_client, finder, met):
    create(own_client, "a/1", "b")

    await finder.start()
    at_first = list(met)
    create(own_client, "c d")
    fork_run(own_client, "b", "fork", START)

    await met.has("c d", "fork")
    assert at_first == ["a/1", "b"]
    assert len(met) == 4


async def test_a_run_that_takes_the_place_of_a_deleted_one_is_met(own_client, finder, met):
    # As many runs as before, so that their number says nothing.
    create(own_client, "old")
    await finder.start()

    delete_run(own_client, "old")
    create(own_client, "new")

    await met.has("new")


async def test_run_whose_creator_died_is_found_by_the_number_of_runs(own_client, counting, met):
    create(own_client, "before")
    await counting.start()

    own_client.sadd(keys.RUNS, "silent")

    await met.has("silent")
    assert list(met) == ["before", "silent"]


async def test_a_new_run_costs_no_look_at_the_others(own_client, finder, met):
    create(own_client, *(f"run {i}" for i in range(50)))
    await finder.start()
    own_client.config_resetstat()

    create(own_client, "new")
    await met.has("new")

    assert met.count("new") == 1
    assert len(met) == 51
    assert "cmdstat_smembers" not in own_client.info("commandstats")


async def test_announced_runs_cost_no_later_read_of_the_list(own_client, counting, met):
    await counting.start()
    create(own_client, "new")
    await met.has("new")
    own_client.config_resetstat()

    async def were_counted() -> bool:
        counts = own_client.info("commandstats").get("cmdstat_scard", {"calls": 0})
        return counts["calls"] >= 2

    await wait_until_async(were_counted, describe="two looks at the number of runs")
    assert "cmdstat_smembers" not in own_client.info("commandstats")
    assert list(met) == ["new"]


async def test_more_new_runs_than_the_stream_keeps_are_all_found(own_client, finder, met):
    # The news of the known one is lost, as if it had been opened again, and the number of runs says
    # nothing of it.
    create(own_client, "known")
    await finder.start()
    own_client.config_resetstat()
    many = [f"run {i}" for i in range(230)]

    with own_client.pipeline() as pipeline:  # at one moment, and the stream keeps the last half
        for run in ("known", *many):
            pipeline.sadd(keys.RUNS, keys.encode_name(run))
            pipeline.xadd(keys.NEWS, {"n": keys.encode_name(run)}, maxlen=115, approximate=False)
        pipeline.execute()

    await met.has(*many)
    await met.has_again("known")
    assert not is_counted(own_client)


async def test_every_run_is_found_again_after_an_error_of_the_store(
    own_client, finder, met, monkeypatch, caplog
):
    # What is known may have begun anew, and its news be lost.
    monkeypatch.setattr(search, "_AGAIN_S", 0.01)
    caplog.set_level(logging.INFO, logger=search.__name__)
    create(own_client, "known")
    await finder.start()
    own_client.set(keys.NEWS, "no stream")

    async def is_refused_twice() -> bool:
        refused = own_client.info("errorstats").get("errorstat_WRONGTYPE", {"count": 0})
        return refused["count"] >= 2

    await wait_until_async(is_refused_twice)
    own_client.config_resetstat()
    own_client.sadd(keys.RUNS, "meanwhile")
    own_client.delete(keys.NEWS)
    create(own_client, "later")

    await met.has("meanwhile", "later")
    assert not is_counted(own_client)
    await met.has_again("known")
    said = [each.getMessage().partition(":")[0] for each in caplog.records]
    assert said == ["new runs are not found", "new runs are found again"]


async def test_unreadable_news_does_not_end_the_search(
    own_client, finder, met, monkeypatch, caplog
):
    monkeypatch.setattr(search, "_AGAIN_S", 0.01)
    create(own_client, "known")
    await finder.start()

    own_client.xadd(keys.NEWS, {"no": "name"})
    await met.has_again("known")
    create(own_client, "later")

    await met.has("later")
    assert "the search for runs failed" in caplog.text


async def test_a_store_that_goes_away_while_runs_are_met_ends_the_start(own_client, finder, met):
    create(own_client, "a", "b")
    met.is_store_away = True

    with pytest.raises(StoreUnavailableError):
        await finder.start()

    assert list(met) == ["a"]


async def test_a_store_that_was_away_is_searched_when_it_is_back(
    own_server, own_client, finder, met
):
    create(own_client, "before")
    await finder.start()
    own_client.sadd(keys.RUNS, "silent")

    await asyncio.to_thread(own_server.kill)
    await asyncio.to_thread(own_server.restart)
    create(own_client, "after")

    await met.has("silent", "after")
    assert not is_counted(own_client)


async def test_unreadable_name_hides_no_other_run(own_client, finder, met, caplog):
    own_client.sadd(keys.RUNS, b"\xff")
    create(own_client, "good")

    await finder.start()
    create(own_client, "later")

    await met.has("good", "later")
    assert r"run \xff is left alone for now" in caplog.text


async def test_run_that_cannot_be_opened_is_retried_and_hides_no_other(own_client, counting, met):
    met.defects.add("bad")
    create(own_client, "bad", "good")

    await counting.start()

    assert list(met) == ["bad", "good"]
    met.clear()
    await met.has("bad")
