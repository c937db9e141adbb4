from __future__ import annotations

from typing import Any

import pytest

from testkit import wait_until_async
from turnstream_server.bus.leadership.leadership import (
    acquire_leadership,
    note_trouble,
    release_leadership,
)

pytestmark = pytest.mark.redis


async def now_ms(run: Any) -> int:
    """The time of the store."""
    seconds, microseconds = await run.client.time()
    return seconds * 1000 + microseconds // 1000


async def test_only_one_of_two_planners_leads(run: Any) -> None:
    first = await acquire_leadership(run.client, run.name, owner="p", lease_s=60)
    asked_ms = await now_ms(run)
    second = await acquire_leadership(run.client, run.name, owner="q", lease_s=60)
    told_ms = await now_ms(run)

    assert (first.is_ours, first.epoch, first.owner) == (True, 1, "p")
    assert (second.is_ours, second.epoch, second.owner) == (False, 1, "p")
    expires_ms = int(await run.client.hget(run.keys.leader, "expires_ms"))
    left_ms = round(second.lease_left_s * 1000)
    assert expires_ms - told_ms <= left_ms <= expires_ms - asked_ms


async def test_a_renewal_keeps_the_epoch_and_lengthens_the_lease(run: Any) -> None:
    await acquire_leadership(run.client, run.name, owner="p", lease_s=60)

    renewed = await acquire_leadership(run.client, run.name, owner="p", lease_s=90)

    other = await acquire_leadership(run.client, run.name, owner="q", lease_s=60)
    assert renewed.epoch == 1
    assert other.lease_left_s > 60


async def test_another_planner_takes_over_with_a_new_epoch_when_the_lease_ends(run: Any) -> None:
    await acquire_leadership(run.client, run.name, owner="p", lease_s=0.05)

    async def taken_over() -> Any:
        other = await acquire_leadership(run.client, run.name, owner="q", lease_s=60)
        return other if other.is_ours else None

    taken = await wait_until_async(taken_over)

    assert taken.epoch == 2
    late = await acquire_leadership(run.client, run.name, owner="p", lease_s=60)
    assert not late.is_ours


async def test_a_released_leadership_can_be_taken_at_once(run: Any) -> None:
    released = await release_leadership(run.term_of(1), owner="p")
    again = await release_leadership(run.term_of(1), owner="p")

    taken = await acquire_leadership(run.client, run.name, owner="q", lease_s=60)
    assert (released, again) == (True, False)
    assert (taken.is_ours, taken.epoch) == (True, 2)


async def test_a_late_release_does_not_touch_the_next_leader(run: Any) -> None:
    await release_leadership(run.term_of(1), owner="p")
    await acquire_leadership(run.client, run.name, owner="p", lease_s=60)

    released = await release_leadership(run.term_of(1), owner="p")

    other = await acquire_leadership(run.client, run.name, owner="q", lease_s=60)
    assert not released
    assert (other.is_ours, other.owner, other.epoch) == (False, "p", 2)


async def test_clock_set_back_does_not_extend_a_dead_leaders_lease(run: Any) -> None:
    # The server's clock went back by an hour: to it, the lease ends in an hour and a minute.
    seconds, _ = await run.client.time()
    await run.client.hset(run.keys.leader, "expires_ms", (seconds + 3660) * 1000)

    seen = await acquire_leadership(run.client, run.name, owner="q", lease_s=60)
    later = await acquire_leadership(run.client, run.name, owner="q", lease_s=60)

    assert not seen.is_ours
    assert seen.lease_left_s == 60
    assert later.lease_left_s <= 60


async def test_trouble_is_recorded_by_the_leader_and_cleared_with_its_term(run: Any) -> None:
    by_leader = await note_trouble(
        run.client, run.name, "planning_trouble", "the moon is full", owner="p"
    )
    by_other = await note_trouble(
        run.client, run.name, "planning_trouble", "no moon at all", owner="q"
    )
    kept = await run.client.hget(run.keys.leader, "planning_trouble")
    await release_leadership(run.term_of(1), owner="p")
    await acquire_leadership(run.client, run.name, owner="q", lease_s=60)

    assert (by_leader, by_other, kept) == (True, False, b"the moon is full")
    assert await run.client.hget(run.keys.leader, "planning_trouble") is None
