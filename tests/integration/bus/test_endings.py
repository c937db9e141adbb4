"""The end of a closed run: orphaned groups are decided, and the end follows all events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from turnstream.store.run.runs import close_run, pause_run, resume_run
from turnstream.types import DeadlineFired, Purpose, RunFinished
from turnstream_server.bus.core.frontier import read_frontier_async
from turnstream_server.bus.planning.announcements import finish_run
from turnstream_server.bus.planning.deadlines import end_orphaned, find_orphaned
from turnstream_server.bus.planning.groups import is_evaluating

pytestmark = pytest.mark.redis


async def find(run: Any, *group_ids: str) -> dict[str, int]:
    return await find_orphaned(run.term, group_ids)


async def end(run: Any, **unheld: int) -> int:
    return await end_orphaned(run.term, unheld)


async def finish(run: Any, position: str) -> bool:
    return await finish_run(run.term, step=3, position=position)


async def position(run: Any) -> str:
    entries: Any = await run.client.execute_command("XREVRANGE", run.keys.events, "+", "-")
    return entries[0][0].decode()


@pytest.fixture
def close(client: redis.Redis) -> Callable[[Any], bool]:
    return lambda run: close_run(client, run.name)


async def abandoned(run: Any, group_id: str, **fields: Any) -> None:
    """A group of two with one abandoned and one open sample."""
    await run.open(group_id, **fields)
    await run.abandon(group_id, 0)


async def test_group_without_an_open_attempt_is_orphaned(run: Any, close: Any) -> None:
    await abandoned(run, "held")
    await abandoned(run, "free")
    await run.abandon("free", 1)
    await abandoned(run, "sealed")
    await run.seal("sealed", 1)
    close(run)

    assert await find(run, "held", "free", "sealed", "unknown") == {"free": 0, "sealed": 0}


async def test_a_group_that_waits_for_a_reward_is_held(run: Any, close: Any) -> None:
    await abandoned(run, "judged")
    await run.seal("judged", 1, awaits_reward=True)
    close(run)

    assert await find(run, "judged") == {}


async def test_another_attempt_of_a_sample_holds_its_group(run: Any, close: Any) -> None:
    await abandoned(run, "again")
    await run.abandon("again", 1)
    await run.grant("again", 0)
    refilled = await find(run, "again")
    await run.open("again", attempt=1)
    close(run)

    assert refilled == {}  # the run was open
    assert await find(run, "again") == {}


async def test_orphaned_evaluation_is_ended_too(run: Any, close: Any) -> None:
    await abandoned(run, "eval", purpose=Purpose.EVAL)
    held = await find(run, "eval")
    await run.abandon("eval", 1)
    close(run)

    assert held == {}
    assert await find(run, "eval") == {"eval": 0}
    assert await is_evaluating(run.client, run.name)
    assert await end(run, eval=0) == 1


async def test_in_a_run_that_is_open_somebody_may_begin_what_is_left(run: Any) -> None:
    await abandoned(run, "free")
    await run.abandon("free", 1)
    before = await run.dump()

    assert await find(run, "free") == {}
    assert await end(run, free=0) == 0
    assert await run.dump() == before


async def test_a_group_that_is_planned_is_left_alone(run: Any, close: Any) -> None:
    await run.plan_steps(1)
    close(run)

    assert await find(run, "g1") == {}


async def test_deadline_of_an_orphaned_group_is_fired(run: Any, close: Any) -> None:
    await abandoned(run, "free")
    await run.abandon("free", 1)
    await run.client.zadd(run.keys.deadlines, {"group:free": 1})
    close(run)

    assert await end(run, free=0) == 1
    assert (await run.events())[-1] == DeadlineFired(group_id="free", num_refills=0)
    assert await run.client.zrange(run.keys.deadlines, 0, -1) == []


async def test_group_that_was_continued_in_between_is_not_ended(run: Any, close: Any) -> None:
    await abandoned(run, "free")
    await run.abandon("free", 1)
    close(run)
    found = await find(run, "free")
    await run.open("free", attempt=1)
    before = await run.dump()

    assert await end(run, **found) == 0
    assert await run.dump() == before


async def test_group_with_a_refill_granted_in_between_is_not_ended(run: Any, close: Any) -> None:
    await abandoned(run, "free")
    await run.abandon("free", 1)
    close(run)
    found = await find(run, "free")
    await run.grant("free", 0)

    assert await end(run, **found) == 0
    assert await find(run, "free") == {"free": 1}


async def test_run_finished_is_written_once_after_the_last_event(run: Any, close: Any) -> None:
    close(run)
    last = await position(run)

    told = [await finish(run, last) for _ in range(2)]

    assert told == [True, True]
    assert [each for each in await run.events() if isinstance(each, RunFinished)] == [
        RunFinished(step=3)
    ]
    assert (await read_frontier_async(run.client, run.name)).is_finished


async def test_run_is_not_finished_after_an_event_unknown_to_its_planner(
    run: Any, close: Any
) -> None:
    await run.open("g")
    close(run)
    known = await position(run)
    await run.abandon("g", 0)

    assert not await finish(run, known)
    assert not (await read_frontier_async(run.client, run.name)).is_finished
    assert await finish(run, await position(run))


async def test_a_run_that_is_open_has_no_end(run: Any) -> None:
    await run.open("g")

    assert not await finish(run, await position(run))
    assert not (await read_frontier_async(run.client, run.name)).is_finished


async def test_a_paused_run_is_planned_no_further(run: Any, client: redis.Redis) -> None:
    await run.open("g")
    for sample in range(2):
        await run.seal("g", sample)
    pause_run(client, run.name)
    before = await run.dump()

    assert await run.try_to_plan("g") is None
    refused = await run.dump()
    resume_run(client, run.name)
    await run.plan("g")

    assert refused == before
    assert (await read_frontier_async(run.client, run.name)).planned == 1
