"""Rewards that are posted after the seal, by any process, at any later time."""

import asyncio
import subprocess
import sys
from typing import Any

import pytest
import redis
import redis.asyncio

from turnstream.errors import ConflictError, RunNotFoundError
from turnstream.store.client import keys
from turnstream.store.run.rewards import RewardOutcome
from turnstream.types import RewardPosted, TrajectoryKey, TrajectoryState
from turnstream_server.bus.admin.deletion import delete_run
from turnstream_server.bus.leadership.leadership import Term
from turnstream_server.bus.planning.deadlines import fire_deadlines

POSTED, DUPLICATE, LATE = RewardOutcome.POSTED, RewardOutcome.DUPLICATE, RewardOutcome.LATE
STAGES = ("sealed", "planned", "committed", "released")

# Posts the same reward twice, and says what it was answered.
JUDGE = """
import sys
from turnstream.store.client.connection import connect
from turnstream.store.run.rewards import post_reward
from turnstream.types import TrajectoryKey

url, run = sys.argv[1:]
with connect(url) as client:
    print(*(post_reward(client, run, TrajectoryKey("a", 0), 0.5) for _ in range(2)))
"""


async def live_until(run: Any, stage: str) -> None:
    """Sample 0 of group "a" is rewarded, sample 2 awaits its reward; then both go this far."""
    await run.open("a", num_samples=3, num_needed=2)
    await run.seal("a", 0, awaits_reward=True)
    await run.seal("a", 1)
    await run.seal("a", 2, awaits_reward=True)
    assert await run.post_reward("a", 0, 0.5) is POSTED
    if stage == "sealed":
        await run.settle("a", TrajectoryState.SURPLUS, 2)
        return
    await run.plan("a")
    if stage == "planned":
        return
    await run.commit(await run.start("s"), 1)
    if stage == "committed":
        return
    assert await run.advance_watermark() == 1
    await run.release(("a", 0), ("a", 1), ("a", 2))
    if stage == "folded":
        await run.fold_ends("a/2/0")
        await run.fold(1)
        assert await run.client.exists(run.keys.ledger, run.keys.groups) == 0


async def num_late(run: Any) -> int:
    counts = run.ledger()
    counts.check()
    return counts.num_late_rewards


@pytest.fixture
async def short(async_client: redis.asyncio.Redis, start_run: Any) -> Any:
    """A run that keeps one checkpoint, so that a step is released as soon as it is committed."""
    return await start_run(async_client, retain_checkpoints=1)


async def test_a_reward_may_come_from_a_process_that_has_written_nothing(
    server: Any, run: Any
) -> None:
    await run.open("a")
    await run.seal("a", 0, awaits_reward=True)

    command = [sys.executable, "-c", JUDGE, server.url, run.name]
    told = await asyncio.to_thread(subprocess.check_output, command, text=True)

    assert told.split() == ["OK", "DUPLICATE"]
    assert await run.client.hget(run.keys.ledger, "a/0/0") == b"sealed:1"
    assert (await run.events())[-1] == RewardPosted(key=TrajectoryKey("a", 0), reward=0.5)


@pytest.mark.parametrize("stage", STAGES)
async def test_reward_that_counted_is_a_duplicate_while_the_ledger_has_it(
    short: Any, stage: str
) -> None:
    await live_until(short, stage)
    before = await short.dump()

    assert await short.post_reward("a", 0, 0.5) is DUPLICATE
    with pytest.raises(ConflictError, match="another reward was posted for a/0/0"):
        await short.post_reward("a", 0, 0.25)

    assert await short.dump() == before


@pytest.mark.parametrize("stage", STAGES)
async def test_reward_after_its_group_was_decided_is_late_and_counted_once(
    short: Any, stage: str
) -> None:
    await live_until(short, stage)
    num_events = len(await short.events())

    outcomes = [await short.post_reward("a", 2, 1.0) for _ in range(2)]

    assert outcomes == [LATE, LATE]
    assert await num_late(short) == 1
    assert len(await short.events()) == num_events
    with pytest.raises(ConflictError, match="another reward was posted for a/2/0"):
        await short.post_reward("a", 2, 0.0)


async def test_reward_of_a_trajectory_that_left_the_ledger_is_late(short: Any) -> None:
    await live_until(short, "folded")

    assert await short.post_reward("a", 0, 0.5) is LATE

    assert await num_late(short) == 1
    assert await short.client.exists(short.keys.rewards) == 0


async def test_reward_of_an_unknown_trajectory_is_refused(short: Any) -> None:
    await live_until(short, "folded")
    await short.open("b")
    before = await short.dump()

    for group_id, sample in (("A", 0), ("b", 7)):
        with pytest.raises(ConflictError, match=f"{group_id}/{sample}/0 was never opened"):
            await short.post_reward(group_id, sample, 1.0)

    assert await short.dump() == before


@pytest.mark.parametrize("stage", ["sealed", "folded"])
async def test_reward_for_a_deleted_run_is_refused_and_writes_nothing(
    client: redis.Redis, short: Any, stage: str
) -> None:
    await live_until(short, stage)
    delete_run(client, short.name)

    with pytest.raises(RunNotFoundError, match=f"no run named '{short.name}'"):
        await short.post_reward("a", 0, 0.5)

    names = keys.run_keys(short.name)
    assert client.exists(names.rewards, names.counts, names.conflicts) == 0


async def test_reward_after_its_deadline_is_late_before_it_is_folded(
    async_client: redis.asyncio.Redis, start_run: Any
) -> None:
    # It was told to count, and its group was dropped: the event of the deadline came first.
    run = await start_run(async_client, reward_deadline_s=1.0)
    await run.open("a", num_samples=1)
    await run.seal("a", 0, awaits_reward=True)

    await fire_deadlines(Term(async_client, run.name, run.leader_epoch), run_ms=1 << 50)

    assert await run.post_reward("a", 0, 0.5) is LATE
    assert await run.post_reward("a", 0, 0.5) is LATE
    assert await num_late(run) == 1
