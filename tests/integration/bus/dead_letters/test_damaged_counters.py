"""A damaged counter is refused before the first write of a discard or a rejection."""

from __future__ import annotations

from typing import Any

import pytest

from turnstream.errors import CorruptRecordError
from turnstream.store.client.scripts import run_command
from turnstream.store.run.budget import reserve_command
from turnstream_server.bus.admin.dead_letters import discard_trajectory

pytestmark = pytest.mark.redis

EVENT = f"{2**52}-1"


def contents(dead_run: Any) -> dict[bytes, bytes]:
    """Every key of the run, but the clock, as it is stored."""
    found: Any = dead_run.client.keys(f"*{dead_run.run}*")
    return {key: dead_run.client.dump(key) for key in found}


@pytest.mark.parametrize("field", ["dead_bytes", "dead"])
async def test_damaged_counter_is_refused_before_a_dead_letter_changes(
    dead_run: Any, field: str
) -> None:
    # HINCRBY once failed after the dead letter was removed: its bytes stayed in the count.
    await dead_run.add("g/0/0")
    count: Any = dead_run.client.hget(dead_run.names.counts, field)
    dead_run.client.hset(dead_run.names.counts, field, b"\xc5")
    before = contents(dead_run)

    with pytest.raises(CorruptRecordError, match=f"damaged: .*:counts, field '{field}'"):
        discard_trajectory(dead_run.client, dead_run.run, "g/0/0")
    with pytest.raises(CorruptRecordError, match=f"damaged: .*:counts, field '{field}'"):
        await dead_run.reject(EVENT, b"no record")
    dead_run.client.xdel(dead_run.names.events, EVENT)
    after = contents(dead_run)
    dead_run.client.hset(dead_run.names.counts, field, count)

    assert {key for key in after if after[key] != before.get(key)} <= {
        dead_run.names.events.encode(),  # an entry came and went
        dead_run.names.leader.encode(),
    }
    assert discard_trajectory(dead_run.client, dead_run.run, "g/0/0")


def test_reserve_in_a_run_with_a_damaged_counter_writes_nothing(dead_run: Any) -> None:
    dead_run.publish("g", 0)
    dead_run.client.hset(dead_run.names.budget, "reserved", "much")
    before = contents(dead_run)

    command = reserve_command(dead_run.run, [("g/1/0", 1, 10**6)])
    with pytest.raises(CorruptRecordError, match=r"budget, field 'reserved': .much"):
        run_command(dead_run.client, command)

    assert contents(dead_run) == before
