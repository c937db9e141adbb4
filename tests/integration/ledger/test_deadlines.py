"""Deadlines, refills and late rewards, script by script."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from turnstream.batching.fold.decisions import GroupCut
from turnstream.errors import ConflictError, NotReadyError
from turnstream.generator.api.work import WorkQueue
from turnstream.generator.transport.transport import BoundedCalls, RedisRequests
from turnstream.store.run.rewards import RewardOutcome
from turnstream.store.run.tasks import Refill
from turnstream.store.waits.bounded_call import StoreWait
from turnstream.types import (
    DeadlineFired,
    RewardPosted,
    TrajectoryKey,
    TrajectoryState,
)
from turnstream_server.ledger.leadership.writes import Difference, write
from turnstream_server.ledger.planning.deadlines import Deadline, fire, limit

HOUR_MS = 3_600_000


@pytest.fixture
async def timed(start_run: Callable[..., Any]) -> Any:
    """A run with deadlines of an hour, and refills."""
    return await start_run(
        group_deadline_s=3600,
        reward_deadline_s=1800,
        deadline_policy="refill",
        max_refills=2,
    )


async def members_of(run: Any, name: str) -> list[bytes]:
    return await run.client.zrange(getattr(run.keys, name), 0, -1)


async def test_group_has_a_deadline_from_its_opening_if_configured(run: Any, timed: Any) -> None:
    for each in (run, timed):
        await each.open("a")
        await each.open("a")

    next_ms = await timed.fire()

    assert (await members_of(run, "deadlines"), await run.fire()) == ([], -1)
    assert await members_of(timed, "deadlines") == [b"group:a"]
    assert next_ms == HOUR_MS


async def test_more_deadlines_than_fit_into_one_call_all_fire_once(timed: Any) -> None:
    for number in range(250):
        await timed.open(f"g {number}", num_samples=1)
    await timed.make_due()

    assert [await timed.fire() for _ in range(2)] == [-1, -1]

    fired = [event for event in await timed.events() if isinstance(event, DeadlineFired)]
    assert len({event.group_id for event in fired}) == len(fired) == 250


async def test_no_deadline_is_later_than_one_that_is_set_now(timed: Any) -> None:
    await timed.open("a")
    await timed.client.zadd(timed.keys.deadlines, {"group:a": 10**15})

    await timed.fire()

    assert await timed.fire() == HOUR_MS


async def test_the_longer_deadline_of_the_run_is_the_latest(start_run: Callable[..., Any]) -> None:
    run = await start_run(group_deadline_s=60, reward_deadline_s=3600)
    await run.open("a", num_samples=1)
    await run.seal("a", 0, awaits_reward=True)
    await run.client.zrem(run.keys.deadlines, "group:a")

    assert await run.fire() == HOUR_MS


@pytest.mark.both_servers
async def test_a_deadline_from_before_the_run_had_none_stays_where_it_was(run: Any) -> None:
    await run.open("a")
    due_ms = await run.run_ms() + HOUR_MS
    await run.client.zadd(run.keys.deadlines, {"group:a": due_ms})

    assert await run.fire() == HOUR_MS


@pytest.mark.parametrize("since", ["refilled", "moved", "fired"])
async def test_late_write_of_a_deadline_changes_nothing(timed: Any, since: str) -> None:
    await timed.open("a")
    await timed.make_due()
    ((member, due_ms),) = await timed.client.zrange(timed.keys.deadlines, 0, -1, withscores=True)
    found = Deadline(member.decode(), b"%d" % due_ms)
    if since == "refilled":
        await timed.grant("a", 1)
        await timed.make_due()
    elif since == "moved":
        await timed.client.zadd(timed.keys.deadlines, {"group:a": 10})
    else:
        await timed.fire()

    async with timed.unchanged():
        assert isinstance(await write(timed.term, fire(found)), Difference)


async def test_all_late_deadlines_are_moved_if_their_config_is_in_force(timed: Any) -> None:
    late = {f"group:{number}": 10**15 for number in range(250)}
    await timed.client.zadd(timed.keys.deadlines, late)

    async with timed.unchanged():
        found = await write(timed.term, limit([b"group:0"], latest_ms=9, revision=2))
    next_ms = await timed.fire()

    assert isinstance(found, Difference)
    assert next_ms == HOUR_MS
    assert await timed.client.zcount(timed.keys.deadlines, 10**15, "+inf") == 0


@pytest.mark.parametrize("how", ["planned", "dropped", "cut"])
async def test_a_group_that_is_decided_has_no_deadline(timed: Any, how: str) -> None:
    await timed.open("a", num_samples=3, num_sealed=2)
    await timed.seal("a", 2, awaits_reward=True)

    if how == "planned":
        await timed.plan("a")
    elif how == "dropped":
        await timed.settle("a", TrajectoryState.INCOMPLETE, 0, 1)
    else:
        await timed.carry_out(GroupCut(group_id="a", reason="enough"))

    assert await members_of(timed, "deadlines") == []
    timed.ledger().check()


async def test_refill_takes_the_first_unopened_attempt(timed: Any) -> None:
    await timed.open("a")
    await timed.open("a", attempt=1)

    await timed.grant("a", 1, attempt=1)

    assert await members_of(timed, "refills") == [b"a/1/2"]


async def test_a_cut_that_comes_after_a_refill_was_granted_ends_nothing(timed: Any) -> None:
    # A delayed call ended the new attempt, and no other was granted.
    await timed.open("a", num_sealed=1)
    await timed.carry_out(cut := GroupCut(group_id="a", reason="enough"))
    await timed.grant("a", 1)
    await timed.open("a", attempt=1)
    before = timed.dump()

    await timed.carry_out(cut)
    late = timed.dump()
    await timed.carry_out(replace(cut, num_granted=1))

    assert late == before
    assert await timed.client.hget(timed.keys.groups, "a") == b"2:decided"


async def test_one_of_many_takes_a_refill(timed: Any) -> None:
    await timed.open("a/b", num_samples=3, num_needed=2)
    await timed.grant("a/b", 2)

    async def take(writer: str) -> Refill:
        wait = StoreWait("store", "refill", "no refill", wait_s=0)
        return await WorkQueue(writer).next_refill(
            timed.name, BoundedCalls(RedisRequests(timed.client), wait)
        )

    refill = await take("w1")
    with pytest.raises(NotReadyError, match="no refill within 0 s"):
        await take("w2")

    assert (refill.key, refill.group.prompt_uid) == (TrajectoryKey("a/b", 2, 1), "uid")
    assert (refill.group.num_samples, refill.group.num_needed) == (3, 2)
    assert await timed.client.hget(timed.keys.ledger, refill.key.trajectory_id) == b"open:1:w1"
    assert await members_of(timed, "refills") == []
    timed.ledger().check()


async def test_a_late_reward_completes_a_trajectory_once(timed: Any) -> None:
    await timed.open("a", num_samples=3)
    await timed.seal("a", 0, awaits_reward=True)
    awaiting = timed.ledger()
    await timed.seal("a", 1)

    outcomes = [await timed.post_reward("a", 0, 0.5) for _ in range(2)]
    for sample, reason in (
        (0, "another reward was posted for a/0/0"),
        (1, "a/1/0 was sealed with its reward"),
        (2, "a/2/0 is open"),
        (7, "a/7/0 was never opened"),
    ):
        with pytest.raises(ConflictError, match=reason):
            await timed.post_reward("a", sample, 0.25)

    assert outcomes == [RewardOutcome.POSTED, RewardOutcome.DUPLICATE]
    assert awaiting.by_state[TrajectoryState.AWAITING_REWARD] == 1
    counts = timed.ledger()
    counts.check()
    assert counts.by_state[TrajectoryState.SEALED] == 2
    posted = RewardPosted(key=TrajectoryKey("a", 0), reward=0.5)
    assert (await timed.events())[3:] == [posted]
    assert await members_of(timed, "deadlines") == [b"group:a"]


async def test_a_reward_that_does_not_come_is_an_event(timed: Any) -> None:
    await timed.open("a")
    await timed.seal("a", 1, awaits_reward=True)
    await timed.client.zrem(timed.keys.deadlines, "group:a")
    half_an_hour_ms = await timed.fire()
    await timed.make_due()

    await timed.fire()

    assert half_an_hour_ms == HOUR_MS / 2
    awaited = TrajectoryKey("a", 1)
    assert (await timed.events())[-1] == DeadlineFired(group_id="a", awaited=awaited)
