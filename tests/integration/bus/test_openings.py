"""When groups were opened, as far as anything still tells it."""

from __future__ import annotations

from typing import Any

import pytest

from turnstream_server.bus.core.group_open_times import read_openings

pytestmark = pytest.mark.redis


async def test_a_damaged_snapshot_leaves_it_to_the_events(run: Any, client: Any) -> None:
    await run.open("g")
    await run.client.hset(run.keys.snapshot, "record", b"\x00" * 64)

    openings = read_openings(client, run.name)

    ((opened_at, _),) = await run.client.xrange(run.keys.events)
    assert openings.known_ms == {"g": int(opened_at.split(b"-")[0])}
