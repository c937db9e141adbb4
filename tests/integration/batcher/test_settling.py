"""Decisions of a leader for a ledger that may have them, or may have released the group."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from testkit import group
from turnstream.batching.fold.decisions import GroupCut, GroupDropped, MemberDropped
from turnstream.store.client import keys
from turnstream.store.client.connection import connect_async
from turnstream.types import TrajectoryKey, TrajectoryState
from turnstream_server.batcher.planner.dead_letters import DeadLetterWriter
from turnstream_server.batcher.planner.settling import Settler
from turnstream_server.bus.leadership.leadership import Term, acquire_leadership

pytestmark = pytest.mark.redis

GONE = GroupDropped(group_id="gone", state=TrajectoryState.FILTERED, reason="why", keys=())
CUT = GroupCut(group_id="there", reason="enough")


@pytest.fixture
async def client(house: Any) -> AsyncIterator[Any]:
    async with connect_async(house.url) as client:
        yield client


@pytest.fixture
async def run(house: Any) -> str:
    """A run with the group "there"."""
    run = house.create_run()
    await house.publish(run, group("there"))
    return run


@pytest.fixture
async def settler(client: Any, run: str) -> Settler:
    leadership = await acquire_leadership(client, run, owner="p", lease_s=60)
    term = Term(client, run, leadership.epoch)
    return Settler(term, DeadLetterWriter(term))


async def test_released_group_may_lack_only_the_ends_of_its_members(settler):
    late = MemberDropped(
        key=TrajectoryKey("gone", 2), state=TrajectoryState.SURPLUS, reason="too late"
    )

    assert await settler.without_settled([late, GONE, CUT]) == [late, CUT]


async def test_a_group_that_cannot_be_settled_keeps_no_other_from_it(settler, client, run, caplog):
    await settler.carry_out([GONE, CUT])

    assert await client.hget(keys.run_keys(run).groups, "there") == b"2:decided"
    assert "cannot be settled: group gone is unknown, or finished" in caplog.text
