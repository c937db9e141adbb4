"""Rewards that are posted after the seal, by any process, at any later time."""

from typing import Any

import pytest

from turnstream.errors import ConflictError, RunNotFoundError
from turnstream.store.client import keys
from turnstream.store.run.rewards import RewardOutcome
from turnstream.types import TrajectoryState
from turnstream_server.ledger.admin.deletion import delete_run
from turnstream_server.ledger.planning.deadlines import fire_deadlines

POSTED, DUPLICATE, LATE = RewardOutcome.POSTED, RewardOutcome.DUPLICATE, RewardOutcome.LATE
STAGES = ("sealed", "planned", "committed", "released")


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
    await run.release("a/0/0", "a/1/0", "a/2/0")
    if stage == "folded":
        await run.fold_ends("a/2/0")
        await run.compact(1)
        assert await run.client.exists(run.keys.ledger, run.keys.groups) == 0


async def num_late(run: Any) -> int:
    counts = run.ledger()
    counts.check()
    return counts.num_late_rewards


@pytest.fixture
async def short(start_run: Any) -> Any:
    """A run that keeps one checkpoint, so that a step is released as soon as it is committed."""
    return await start_run(retain_checkpoints=1)


@pytest.mark.parametrize("stage", STAGES)
async def test_reward_that_counted_is_a_duplicate_while_the_ledger_has_it(
    short: Any, stage: str
) -> None:
    await live_until(short, stage)
    async with short.unchanged():
        assert await short.post_reward("a", 0, 0.5) is DUPLICATE
        with pytest.raises(ConflictError, match="another reward was posted for a/0/0"):
            await short.post_reward("a", 0, 0.25)


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


async def test_reward_of_a_sample_that_a_decided_group_never_had_is_refused(short: Any) -> None:
    await live_until(short, "planned")
    async with short.unchanged():
        with pytest.raises(ConflictError, match="a/9/0 was never opened"):
            await short.post_reward("a", 9, 1.0)


async def test_reward_of_an_unknown_trajectory_is_refused(short: Any) -> None:
    await live_until(short, "folded")
    await short.open("b")
    async with short.unchanged():
        for group_id, sample in (("A", 0), ("b", 7)):
            with pytest.raises(ConflictError, match=f"{group_id}/{sample}/0 was never opened"):
                await short.post_reward(group_id, sample, 1.0)


@pytest.mark.parametrize("stage", ["sealed", "folded"])
async def test_reward_for_a_deleted_run_is_refused_and_writes_nothing(
    short: Any, stage: str
) -> None:
    await live_until(short, stage)
    delete_run(short.store, short.name)

    with pytest.raises(RunNotFoundError, match=f"no run named '{short.name}'"):
        await short.post_reward("a", 0, 0.5)

    names = keys.run_keys(short.name)
    assert short.store.exists(names.rewards, names.counts, names.conflicts) == 0


async def test_reward_after_its_deadline_is_late_before_it_is_folded(start_run: Any) -> None:
    # It was told to count, and its group was dropped: the event of the deadline came first.
    run = await start_run(reward_deadline_s=1.0)
    await run.open("a", num_samples=1)
    await run.seal("a", 0, awaits_reward=True)

    await fire_deadlines(run.term, run_ms=1 << 50)

    assert await run.post_reward("a", 0, 0.5) is LATE
    assert await run.post_reward("a", 0, 0.5) is LATE
    assert await num_late(run) == 1
