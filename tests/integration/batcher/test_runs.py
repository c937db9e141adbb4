import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

import testkit
from turnstream.errors import NotReadyError
from turnstream.store.client import keys
from turnstream.store.client.connection import connect_async
from turnstream.store.run.configs import read_config_async
from turnstream_server.batcher.assembly.shares import PlannedBatch
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.bus.core.frontier import read_frontier_async

pytestmark = [pytest.mark.redis]


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
async def client(house) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect_async(house.url) as client:
        yield client


@pytest.fixture
async def slow(client) -> SlowClient:
    return SlowClient(client)


@pytest.fixture
async def view(house, client, slow) -> RunView:
    """A view of a new run whose reads are slow."""
    run = house.create_run()
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


async def test_lost_revision_is_not_reported_as_a_missing_run(house, client):
    run = house.create_run()
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
