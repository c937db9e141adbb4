"""A damaged counter is refused before the first write: the calls that end dead letters."""

from __future__ import annotations

from typing import Any

import pytest

from turnstream.errors import CorruptRecordError
from turnstream.store.budget import reserve_command
from turnstream.store.scripts import run_command
from turnstream_server.bus.letters import discard_event, discard_letter

pytestmark = pytest.mark.redis

EVENT, LATER = f"{2**52}-1", f"{2**52}-2"


def contents(office: Any) -> dict[bytes, bytes]:
    """Every key of the run, but the clock, as it is stored."""
    found: Any = office.client.keys(f"*{office.run}*")
    return {key: office.client.dump(key) for key in found}


@pytest.mark.parametrize("field", ["dead_bytes", "dead"])
async def test_letters_of_a_run_with_a_damaged_counter_stay_as_they_are(
    office: Any, field: str
) -> None:
    # The letter was removed, HINCRBY failed after it, and its bytes were counted for ever.
    await office.bury("g/0/0")
    assert await office.keep_event(EVENT, b"no record")
    count: Any = office.client.hget(office.names.counts, field)
    office.client.hset(office.names.counts, field, b"\xc5")
    before = contents(office)

    for call, name in ((discard_letter, "g/0/0"), (discard_event, EVENT)):
        with pytest.raises(CorruptRecordError, match=f"damaged: .*:counts, field '{field}'"):
            call(office.client, office.run, name)
    with pytest.raises(CorruptRecordError, match=f"damaged: .*:counts, field '{field}'"):
        await office.keep_event(LATER, b"no record")
    office.client.xdel(office.names.events, LATER)
    after = contents(office)
    office.client.hset(office.names.counts, field, count)

    assert {key for key in after if after[key] != before.get(key)} <= {
        office.names.events.encode(),  # an entry came and went
        office.names.leader.encode(),
    }
    assert discard_letter(office.client, office.run, "g/0/0")
    assert discard_event(office.client, office.run, EVENT)


def test_reserve_in_a_run_with_a_damaged_counter_writes_nothing(office: Any) -> None:
    office.publish("g", 0)
    office.client.hset(office.names.budget, "reserved", "much")
    before = contents(office)

    command = reserve_command(office.run, [("g/1/0", 1, 10**6)])
    with pytest.raises(CorruptRecordError, match=r"budget, field 'reserved': .much"):
        run_command(office.client, command)

    assert contents(office) == before
