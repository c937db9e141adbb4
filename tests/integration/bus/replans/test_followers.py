"""A replica that follows a run receives the plans that are made after a withdrawal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from testkit import wait_until_async
from turnstream.store.client.cancellation import cancel_all
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.planner.parking import ParkedRuns
from turnstream_server.batcher.planner.planner import RunPlanner
from turnstream_server.batcher.planner.renewal import LeadershipKeeper
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.batcher.planner.snapshotting import DEFAULT_UPKEEP
from turnstream_server.bus.core.frontier import read_frontier_async

pytestmark = pytest.mark.redis


@pytest.fixture
async def view(run: Any, server: Any) -> AsyncIterator[RunView]:
    """The view of a run in a replica that does not lead it."""
    frontier = await read_frontier_async(run.client, run.name)
    view = RunView(run.client, run.name, frontier=frontier, on_stepped=lambda _: None)
    assembler = Assembler(server.url, max_cache_bytes=1 << 20)
    keeper = LeadershipKeeper(server.url, owner="follower", lease_s=60)
    parked = ParkedRuns(run.client)
    planner = RunPlanner(view, assembler, keeper=keeper, upkeep=DEFAULT_UPKEEP, parked=parked)
    following = asyncio.create_task(planner.run())
    yield view
    await cancel_all([following])
    await keeper.close()
    await assembler.close()


async def test_follower_receives_a_plan_with_the_number_of_a_withdrawn_one(
    run: Any, view: RunView, withdraw_from: Any
) -> None:
    # Groups that were decided are planned again without a word but the plan itself.
    seen: list[int] = []

    async def until_planned(step: int) -> None:
        async def is_so() -> bool:
            return view.frontier.planned == step

        await wait_until_async(is_so)
        seen.append(step)

    await run.plan_steps(3)
    await until_planned(3)
    await withdraw_from(run, 1)
    await until_planned(0)
    run.manifests.clear()

    await run.plan("g2", step=1, revision=1)
    await until_planned(1)

    assert seen == [3, 0, 1]
