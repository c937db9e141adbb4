"""The time of a run, which no jump of the store's clock changes."""

from typing import Any

import pytest

from turnstream.store.run import clock
from turnstream_server.ledger.leadership.leader_fields import RunClock

HOUR_MS = 3_600_000
MOST_MS = 15_000


def term(run: Any) -> RunClock:
    """The clock of a leader whose term has just started."""
    return RunClock(run.term, most_s=MOST_MS / 1000)


async def read(run: Any) -> int:
    """Return the run's time by the store now."""
    fields = await run.client.hmget(run.keys.clock, *clock.FIELDS)
    return clock.run_ms(fields, now_ms=await run.server_ms())


async def due_ms(run: Any, member: str) -> int:
    return int(await run.client.zscore(run.keys.deadlines, member))


async def test_time_of_a_run_advances_with_the_clock_of_its_leader(run: Any) -> None:
    leader = term(run)
    first_ms = await run.run_ms()

    for own_s, store_ms in ((70.0, 5_000), (75.0, 5_000 + HOUR_MS), (80.5, 10_000 - HOUR_MS)):
        await leader.tick(server_ms=store_ms, own_s=own_s)

    assert await run.run_ms() == leader.at(80.5) == first_ms + 10_500
    assert leader.at(81.0) == first_ms + 11_000


@pytest.mark.both_servers
async def test_only_part_of_a_leaders_standstill_counts(run: Any) -> None:
    leader = term(run)
    first_ms = await run.run_ms()
    await leader.tick(server_ms=5_000, own_s=70.0)

    before_ms = leader.at(700.0)
    await leader.tick(server_ms=5_000, own_s=700.0)

    assert before_ms == leader.at(700.0) == await run.run_ms() == first_ms + MOST_MS


async def test_time_of_a_run_stands_still_without_a_leader(run: Any) -> None:
    first_ms = await run.run_ms()
    new_ms = await read(run)

    await term(run).tick(server_ms=await run.server_ms() - HOUR_MS, own_s=0.0)

    assert (new_ms, await read(run)) == (first_ms, first_ms + MOST_MS)


async def test_run_of_a_release_without_a_clock_starts_at_store_time(run: Any) -> None:
    await run.client.delete(run.keys.clock)
    before_ms = await run.server_ms()
    without_ms = await read(run)

    await term(run).tick(server_ms=before_ms, own_s=0.0)

    assert before_ms <= without_ms <= await run.server_ms()
    assert await run.run_ms() == before_ms


@pytest.mark.parametrize("jump_ms", [HOUR_MS, -HOUR_MS])
async def test_deadline_set_after_a_jump_has_its_time_and_little_more(
    start_run: Any, jump_ms: int
) -> None:
    # A group that was opened while the clock was an hour ahead would have hung for an hour longer,
    # one that was opened while it was back would have been dropped at once.
    run = await start_run(
        group_deadline_s=100,
        reward_deadline_s=10,
        deadline_policy="refill",
        max_refills=1,
    )
    await term(run).tick(server_ms=await run.server_ms() - jump_ms, own_s=0.0)

    await run.open("a")
    await run.open("b")
    await run.grant("b", 0)
    await run.seal("a", 0, awaits_reward=True)

    latest_ms = await run.run_ms() + MOST_MS
    dues = [await due_ms(run, name) for name in ("group:a", "group:b", "reward:a/0/0")]
    assert dues == [latest_ms + 100_000, latest_ms + 100_000, latest_ms + 10_000]
