"""The opening times of groups, from the events or the snapshot of the planner."""

from __future__ import annotations

from typing import Any

import pytest

from turnstream_server.bus.queries.run_snapshot import openings_in_snapshot, read_snapshot

pytestmark = pytest.mark.redis


async def test_a_damaged_snapshot_leaves_it_to_the_events(run: Any, client: Any) -> None:
    for group_id in ("gone", "kept"):
        await run.open(group_id)
    (first, _), _ = await run.client.xrange(run.keys.events)
    await run.client.xdel(run.keys.events, first)
    await run.client.hset(run.keys.snapshot, "record", b"\x00" * 64)

    groups = read_snapshot(client, run.name).groups

    assert openings_in_snapshot(client, run.name) == {}
    assert {each.group_id: each.age_s is None for each in groups} == {"gone": True, "kept": False}
