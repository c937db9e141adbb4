"""Requests to plan again: which stand, and how they are answered."""

from __future__ import annotations

from typing import Any

import pytest

from turnstream.errors import ConflictError, NotReadyError, RunNotFoundError
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream_server.bus.core.frontier import Frontier, read_frontier_async
from turnstream_server.bus.planning.replans import (
    await_replan,
    note_damage,
    refuse_replan,
    request_replan,
)

pytestmark = pytest.mark.redis


async def frontier(run: Any) -> Frontier:
    return await read_frontier_async(run.client, run.name)


async def test_a_second_request_joins_the_one_that_stands(run: Any, ask: Any, server: Any) -> None:
    await run.plan_steps(2)
    first = ask(run, 2)

    assert ask(run, 2) == first
    assert ask(run).name == first.name
    with (
        connect(server.url) as client,
        pytest.raises(NotReadyError, match="no batcher has answered"),
    ):
        await_replan(client, run.name, first.name, wait_s=0)
    await refuse_replan(run.term, first, "all is well")
    with connect(server.url) as client, pytest.raises(ConflictError, match="all is well"):
        await_replan(client, run.name, first.name, wait_s=5)
    assert ask(run).name != first.name


async def test_only_the_pending_request_is_refused(run: Any, ask: Any) -> None:
    await run.plan_steps(1)
    request = ask(run)

    other = request._replace(name="other")
    await refuse_replan(run.term, other, "no")

    assert (await frontier(run)).replan == request


async def test_damage_of_a_stepped_step_is_not_noted(run: Any) -> None:
    await run.plan_steps(1)
    await run.commit(await run.start("s"), 1)

    await note_damage(
        run.client, run.name, step=1, manifest_hash=run.manifests[1].hash, sentence="late"
    )

    assert (await frontier(run)).damage is None


def test_a_run_that_is_not_there_cannot_be_asked(client: Any) -> None:
    with pytest.raises(RunNotFoundError):
        request_replan(client, "nowhere")

    assert not client.exists(keys.run_keys("nowhere").frontier)
