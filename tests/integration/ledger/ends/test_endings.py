"""The ends of runs and of evaluations."""

from typing import Any

import pytest
import redis

from turnstream.batching.fold.decisions import GroupCut, GroupEvaluated
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
from turnstream_server.ledger.planning.announcements import finish_run
from turnstream_server.ledger.planning.deadlines import end_orphaned, find_orphaned
from turnstream_server.ledger.planning.groups import is_evaluating, settle_groups
from turnstream_server.ledger.planning.settling import GroupState


async def find(run: Any, *group_ids: str) -> dict[str, GroupState]:
    return await find_orphaned(run.term, group_ids)


async def end(run: Any, found: dict[str, GroupState]) -> int:
    return await end_orphaned(run.term, found.values())


async def finish(run: Any, position: str) -> bool:
    return await finish_run(run.term, step=3, position=position)


async def position(run: Any) -> str:
    entries: Any = await run.client.execute_command("XREVRANGE", run.keys.events, "+", "-")
    return entries[0][0].decode()


def close(run: Any) -> None:
    close_run(run.store, run.name)


async def abandoned(run: Any, group_id: str, num_abandoned: int = 1, **fields: Any) -> None:
    """A group of two; the first samples are abandoned, the others open."""
    await run.open(group_id, **fields)
    for sample in range(num_abandoned):
        await run.abandon(group_id, sample)


async def test_group_without_an_open_attempt_is_orphaned(run: Any) -> None:
    await abandoned(run, "held")
    await abandoned(run, "free", 2)
    await abandoned(run, "sealed")
    await run.seal("sealed", 1)
    await abandoned(run, "judged")
    await run.seal("judged", 1, awaits_reward=True)
    await abandoned(run, "again", 2)
    await run.grant("again", 0)
    await run.open("again", attempt=1)
    await abandoned(run, "cut", 2)
    await run.carry_out(GroupCut(group_id="cut", reason="enough"))
    await run.plan_steps(1)
    while_open = await find(run, "free", "sealed")
    close(run)

    groups = ("held", "free", "sealed", "judged", "again", "cut", "g1", "unknown")
    assert while_open == {}
    assert [*await find(run, *groups)] == ["free", "sealed"]


async def test_orphaned_evaluation_is_ended_too(run: Any) -> None:
    await abandoned(run, "eval", purpose=Purpose.EVAL)
    held = await find(run, "eval")
    await run.abandon("eval", 1)
    close(run)

    assert held == {}
    found = await find(run, "eval")
    assert await is_evaluating(run.client, run.name)
    assert await end(run, found) == 1


@pytest.mark.both_servers
async def test_deadline_of_an_orphaned_group_is_fired_unless_it_has_a_writer(run: Any) -> None:
    for group_id in ("free", "held"):
        await abandoned(run, group_id, 2)
    await run.client.zadd(run.keys.deadlines, {"group:free": 1})
    close(run)
    found = await find(run, "free", "held")
    await run.grant("held", 0)

    assert await end(run, found) == 1
    assert (await run.events())[-1] == DeadlineFired(group_id="free", num_refills=0)
    assert await run.client.zrange(run.keys.deadlines, 0, -1) == []


@pytest.mark.both_servers
async def test_run_finished_is_written_once_after_the_last_event(run: Any) -> None:
    close(run)
    last = await position(run)

    told = [await finish(run, last) for _ in range(2)]

    assert told == [True, True]
    assert [each for each in await run.events() if isinstance(each, RunFinished)] == [
        RunFinished(step=3)
    ]
    assert run.read_frontier().is_finished


async def test_run_is_not_finished_after_an_event_unknown_to_its_planner(run: Any) -> None:
    await run.open("g")
    assert not await finish(run, await position(run))  # it is open
    close(run)
    known = await position(run)
    await run.abandon("g", 0)

    assert not await finish(run, known)
    assert not run.read_frontier().is_finished
    assert await finish(run, await position(run))


async def test_a_paused_run_is_planned_no_further(run: Any) -> None:
    await run.open("g", num_sealed=2)
    pause_run(run.store, run.name)
    async with run.unchanged():
        assert await run.try_to_plan("g") is None

    resume_run(run.store, run.name)
    await run.plan("g")
    assert run.read_frontier().planned == 1


def ended(group_id: str = "e", *, version: int | None = 3, num_groups: int = 1) -> GroupEvaluated:
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
    total = EvalResult(version=version, num_groups=num_groups, num_trajectories=1, num_lost=1)
    keys = (TrajectoryKey(group_id, 0),)
    return GroupEvaluated(group_id=group_id, keys=keys, result=result, total=total)


async def settle(run: Any, *groups: GroupEvaluated) -> None:
    await settle_groups(run.term, groups)


async def test_an_evaluation_ends_with_its_result_and_the_rest_is_surplus(run: Any) -> None:
    # A reward between the deadline and the end left its trajectory sealed.
    await run.open("e", num_samples=4, num_sealed=2, purpose=Purpose.EVAL)
    await run.seal("e", 2, awaits_reward=True)

    await settle(run, ended())

    surplus = b"surplus:its evaluation ended without it"
    assert await run.client.hgetall(run.keys.ledger) == {
        b"e/0/0": b"evaluated:part of an evaluation",
        **{f"e/{sample}/0".encode(): surplus for sample in (1, 2, 3)},
    }
    assert await run.client.hget(run.keys.groups, "e") == b"4:evaluated"
    assert await run.client.zcard(run.keys.leases) == 0
    assert await run.client.zcard(run.keys.deadlines) == 0
    run.ledger().check()
    frontier = run.read_frontier()
    assert (frontier.num_opened_groups, frontier.num_live_groups) == (0, 0)
    (result,) = eval_results(run.store, run.name)
    assert (result.version, result.num_groups) == (3, 1)
    assert result.groups == (ended().result,)
    async with run.unchanged():
        await settle(run, ended())


@pytest.mark.both_servers
async def test_a_group_for_training_is_never_evaluated(run: Any) -> None:
    await run.open("e", num_sealed=1)

    with pytest.raises(ConflictError, match="open, not evaluating"):
        await settle(run, ended())


async def test_lowest_of_too_many_versions_is_dropped(run: Any) -> None:
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


async def test_total_of_evaluations_that_end_together_is_the_last_one(run: Any) -> None:
    for group_id in "efg":
        await run.open(group_id, purpose=Purpose.EVAL)

    await settle(run, *(ended(each, num_groups=n) for n, each in enumerate("efg", start=1)))

    (found,) = eval_results(run.store, run.name)
    assert found.num_groups == 3
    assert [each.group_id for each in found.groups] == ["e", "f", "g"]


async def test_results_are_in_order_of_version(run: Any) -> None:
    for group_id, version in (("a", 10), ("b", None), ("c", 9)):
        await run.open(group_id, purpose=Purpose.EVAL)
        await settle(run, ended(group_id, version=version))

    found = eval_results(run.store, run.name)

    assert [each.version for each in found] == [None, 9, 10]
    assert [each.groups[0].group_id for each in found] == ["b", "c", "a"]


def test_a_run_that_does_not_exist_has_no_results(client: redis.Redis) -> None:
    with pytest.raises(RunNotFoundError):
        eval_results(client, "no such run")
