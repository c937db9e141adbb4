"""Parked runs: when a run can be parked, and what remains of its leadership."""

from __future__ import annotations

from typing import Any

import pytest

from turnstream.store.client.scripts import run_command_async
from turnstream_server.bus.leadership.leadership import (
    Position,
    RunClock,
    acquire_leadership,
    park_leadership,
    renew_command,
)
from turnstream_server.bus.sessions.observers import declare_observer

pytestmark = pytest.mark.redis

START = Position("0-0", "0-0")


@pytest.fixture
def epoch(run: Any) -> int:
    """The epoch of the planner "p", which leads the run."""
    return run.leader_epoch


async def park(run: Any, epoch: int, position: Position = START) -> bool:
    return await park_leadership(run.term_of(epoch), position)


async def test_parked_run_is_led_by_the_next_planner_in_a_new_epoch(run: Any, epoch: int) -> None:
    was_parked = await park(run, epoch)

    first = await acquire_leadership(run.client, run.name, owner="q", lease_s=60)

    assert was_parked
    assert (first.is_ours, first.epoch) == (True, epoch + 1)
    assert await run.client.hget(run.keys.leader, "parked") is None


async def test_planner_that_parked_a_run_leads_it_in_a_new_epoch(run: Any, epoch: int) -> None:
    await park(run, epoch)

    again = await acquire_leadership(run.client, run.name, owner="p", lease_s=60)

    assert (again.is_ours, again.epoch) == (True, epoch + 1)


async def test_follower_learns_the_position_of_a_parked_run(run: Any, epoch: int) -> None:
    await park(run, epoch, Position("5-0", "7-1"))

    found = await acquire_leadership(
        run.client, run.name, owner="q", lease_s=60, leads_parked=False
    )

    assert (found.is_ours, found.parked) == (False, Position("5-0", "7-1"))


async def test_parked_run_can_be_led_after_the_clock_was_reset(run: Any, epoch: int) -> None:
    await park(run, epoch)
    await run.client.hincrby(run.keys.leader, "expires_ms", 3_600_000)

    found = await acquire_leadership(run.client, run.name, owner="q", lease_s=60)

    assert found.is_ours


@pytest.mark.parametrize("kind", ["lease", "deadline", "observer"])
async def test_run_in_which_something_can_expire_is_not_parked(
    run: Any, epoch: int, kind: str
) -> None:
    if kind == "lease":
        await run.open("g")
    elif kind == "deadline":
        await run.client.zadd(run.keys.deadlines, {"group:g": 1})
    else:
        await declare_observer(run.client, run.name, observer="o", first_step=1, expiry_s=60)

    assert not await park(run, epoch)


async def test_renewal_does_not_lengthen_the_lease_of_a_parked_run(run: Any, epoch: int) -> None:
    await park(run, epoch)
    before = await run.hash_of("leader")

    reply = await run_command_async(
        run.client, renew_command(run.name, owner="p", epoch=epoch, lease_s=60)
    )

    assert reply[0] == 1
    assert await run.hash_of("leader") == before


async def test_time_of_a_parked_run_stands_still(run: Any, epoch: int) -> None:
    clock = RunClock(run.term_of(epoch), most_s=15)
    seconds, _ = await run.client.time()
    await clock.tick(server_ms=seconds * 1000, own_s=0)
    await park(run, epoch)
    parked = await run.hash_of("clock")

    await clock.tick(server_ms=seconds * 1000 + 5_000, own_s=5)

    assert parked[b"most_ms"] == b"0"
    assert await run.hash_of("clock") == parked


async def test_lease_that_begins_in_a_parked_run_wakes_it(run: Any, epoch: int) -> None:
    await run.open("g", num_samples=2, num_begun=1)
    await run.seal("g", 0)
    woken_before = await run.last_wake_up()
    assert await park(run, epoch)

    await run.open("g", num_samples=2, num_begun=2)

    assert await run.last_wake_up() != woken_before
