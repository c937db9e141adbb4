"""The end of groups that were opened to evaluate, told to the ledger."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from turnstream.batching.fold.decisions import GroupEvaluated
from turnstream.errors import ConflictError, RunNotFoundError
from turnstream.store.run.evals import eval_results
from turnstream.types import EvalGroup, EvalResult, Purpose, Spread, TrajectoryKey
from turnstream_server.bus.core.frontier import read_frontier_async
from turnstream_server.bus.planning.groups import settle_groups

pytestmark = pytest.mark.redis


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
