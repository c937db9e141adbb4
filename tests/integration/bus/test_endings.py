"""The ends of runs and of evaluations."""

from collections.abc import Callable
from typing import Any

import pytest
import redis

from turnstream.batching.fold.decisions import GroupEvaluated
from turnstream.errors import ConflictError, RunNotFoundError
from turnstream.store.run.evals import eval_results
from turnstream.store.run.runs import close_run, pause_run, resume_run
from turnstream.types import (
    DeadlineFired,
    EvalGroup,
    EvalResult,
    Purpose,
    RunFinished,
    Spread,
    TrajectoryKey,
)
from turnstream_server.bus.core.frontier import read_frontier_async
from turnstream_server.bus.planning.announcements import finish_run
from turnstream_server.bus.planning.deadlines import end_orphaned, find_orphaned
from turnstream_server.bus.planning.groups import is_evaluating, settle_groups


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
    await abandoned(run, "judged")
    await run.seal("judged", 1, awaits_reward=True)
    await abandoned(run, "again")
    await run.abandon("again", 1)
    await run.grant("again", 0)
    await run.open("again", attempt=1)
    await run.plan_steps(1)
    while_open = await find(run, "free", "sealed")
    close(run)

    groups = ("held", "free", "sealed", "judged", "again", "g1", "unknown")
    assert while_open == {}
    assert await find(run, *groups) == {"free": 0, "sealed": 0}


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


def ended(group_id: str = "e", *, version: int | None = 3) -> GroupEvaluated:
    """The end of a group by its first sample."""
    result = EvalGroup(
        group_id=group_id,
        prompt_uid="",
        version=version,
        num_trajectories=1,
        num_lost=1,
        reward=Spread(num=1, mean=0.5),
        best=0.5,
    )
    total = EvalResult(version=version, num_groups=1, num_trajectories=1, num_lost=1)
    keys = (TrajectoryKey(group_id, 0),)
    return GroupEvaluated(group_id=group_id, keys=keys, result=result, total=total)


async def settle(run: Any, *groups: GroupEvaluated) -> None:
    await settle_groups(run.term, groups)


async def test_an_evaluation_ends_with_its_result_and_what_is_open_is_surplus(
    run: Any, client: redis.Redis
) -> None:
    await run.open("e", num_samples=3, purpose=Purpose.EVAL)
    await run.seal("e", 0)
    await run.seal("e", 2, awaits_reward=True)

    await settle(run, ended())

    assert await run.client.hgetall(run.keys.ledger) == {
        b"e/0/0": b"evaluated:part of an evaluation",
        b"e/1/0": b"surplus:its evaluation ended without it",
        b"e/2/0": b"surplus:its evaluation ended without it",
    }
    assert await run.client.hget(run.keys.groups, "e") == b"3:evaluated"
    assert await run.client.zcard(run.keys.leases) == 0
    assert await run.client.zcard(run.keys.deadlines) == 0
    run.ledger().check()
    frontier = await read_frontier_async(run.client, run.name)
    assert (frontier.num_opened_groups, frontier.num_live_groups) == (0, 0)
    (result,) = eval_results(client, run.name)
    assert (result.version, result.num_groups) == (3, 1)
    assert result.groups == (ended().result,)


async def test_reward_after_the_deadline_of_its_evaluation_is_surplus(run: Any) -> None:
    # A reward that came between the deadline and the end left its trajectory sealed for ever.
    await run.open("e", num_samples=2, purpose=Purpose.EVAL)
    await run.seal("e", 0)
    await run.seal("e", 1)

    await settle(run, ended())

    entry = await run.client.hget(run.keys.ledger, "e/1/0")
    assert entry == b"surplus:its evaluation ended without it"
    run.ledger().check()


async def test_ending_an_evaluation_again_changes_nothing(run: Any) -> None:
    await run.open("e", purpose=Purpose.EVAL)
    await run.seal("e", 0)
    await settle(run, ended())
    before = await run.dump()

    await settle(run, ended())

    assert await run.dump() == before


async def test_a_group_for_training_is_never_evaluated(run: Any) -> None:
    await run.open("e")
    await run.seal("e", 0)

    with pytest.raises(ConflictError, match="open, not evaluating"):
        await settle(run, ended())


async def test_lowest_of_too_many_versions_is_dropped(run: Any, client: redis.Redis) -> None:
    kept = {f"{version}": b"" for version in range(2, 1001)}
    await run.client.hset(run.keys.evals, mapping={**kept, "unknown": b""})
    await run.open("e", purpose=Purpose.EVAL)
    await run.open("f", purpose=Purpose.EVAL)

    await settle(run, ended("e", version=1))
    found = await run.client.hkeys(run.keys.evals)

    assert len(found) == 1000
    assert b"unknown" not in found
    await settle(run, ended("f", version=2000))
    assert await run.client.hexists(run.keys.evals, "1") == 0


async def test_results_are_in_order_of_version(run: Any, client: redis.Redis) -> None:
    for group_id, version in (("a", 10), ("b", None), ("c", 9)):
        await run.open(group_id, purpose=Purpose.EVAL)
        await settle(run, ended(group_id, version=version))

    found = eval_results(client, run.name)

    assert [each.version for each in found] == [None, 9, 10]
    assert [each.groups[0].group_id for each in found] == ["b", "c", "a"]


def test_a_run_that_does_not_exist_has_no_results(client: redis.Redis) -> None:
    with pytest.raises(RunNotFoundError):
        eval_results(client, "no such run")
