from __future__ import annotations

from typing import Any

import pytest

from testkit import sealed
from testkit.scripts import script
from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.scripts import run_command_async
from turnstream.types import TrajectoryKey
from turnstream_server.bus.planning.trajectories import post_forgotten_seals
from turnstream_server.bus.queries.ledger import read_ledger_async

pytestmark = pytest.mark.redis


async def write_payload(run: Any, sample: int, *, is_sealed: bool = True, epoch: int = 1) -> None:
    """Store two turns of group "a" and the seal, without an event."""
    key = TrajectoryKey("a", sample)
    names = keys.trajectory_keys(run.name, keys.trajectory_id(key))
    records = [b"turn 0", b"turn 1"]
    if is_sealed:
        records.append(encode_event(sealed("a", sample=sample, lease_epoch=epoch)))
    lease = f"{epoch}:writer"
    append = script("append")((names.turns, names.meta), lease, 0, int(is_sealed), *records)
    await run_command_async(run.client, append)


async def test_a_seal_whose_writer_died_before_its_event_is_posted(run: Any) -> None:
    await run.open("a", num_samples=3)
    await write_payload(run, 0)
    await write_payload(run, 1, is_sealed=False)

    num_posted = await post_forgotten_seals(run.client, run.name)

    ledger = await run.client.hgetall(run.keys.ledger)
    assert num_posted == 1
    assert ledger[b"a/0/0"] == b"sealed:1"
    assert ledger[b"a/1/0"].startswith(b"open:")
    assert ledger[b"a/2/0"].startswith(b"open:")
    assert (await run.events())[1:] == [sealed("a", sample=0)]
    (await read_ledger_async(run.client, run.name)).check()


async def test_a_seal_is_posted_once(run: Any) -> None:
    await run.open("a")
    await write_payload(run, 0)
    await write_payload(run, 1)
    await run.seal("a", 1)

    first = await post_forgotten_seals(run.client, run.name)
    before = await run.dump()
    second = await post_forgotten_seals(run.client, run.name)

    assert (first, second) == (1, 0)
    assert await run.dump() == before


async def test_the_seal_of_another_lease_is_left_alone(run: Any) -> None:
    await run.open("a")
    await write_payload(run, 0, epoch=2)

    assert await post_forgotten_seals(run.client, run.name) == 0

    assert (await run.client.hget(run.keys.ledger, "a/0/0")).startswith(b"open:1:")


async def test_a_run_without_open_trajectories_is_not_searched(run: Any) -> None:
    await run.plan_steps(1)

    assert await post_forgotten_seals(run.client, run.name) == 0


async def test_all_pages_of_a_large_ledger_are_searched(run: Any) -> None:
    # HSCAN gives a large hash in many pages.
    ids = [f"x{number}/0/0" for number in range(5_000)]
    await run.client.hset(run.keys.ledger, mapping=dict.fromkeys(ids, "committed:1"))
    await run.open("a")
    await write_payload(run, 0)
    await write_payload(run, 1)

    assert await post_forgotten_seals(run.client, run.name) == 2


async def test_unreadable_seal_is_posted_for_the_planner_to_reject(
    run: Any,
) -> None:
    # Reading it stopped the sweep, and with it each leader of the run.
    await run.open("a")
    await write_payload(run, 0)
    names = keys.trajectory_keys(run.name, "a/0/0")
    await run.client.execute_command("XDEL", names.turns, "0-3")
    await run.client.execute_command("XADD", names.turns, "0-4", "r", b"no seal")

    assert await post_forgotten_seals(run.client, run.name) == 1

    entries: Any = await run.client.execute_command("XRANGE", run.keys.events, "-", "+")
    assert entries[-1][1] == {b"r": b"no seal", b"t": b"a/0/0"}


async def test_a_seal_whose_entry_is_gone_is_left_to_its_lease(run: Any) -> None:
    await run.open("a")
    await write_payload(run, 0)
    names = keys.trajectory_keys(run.name, "a/0/0")
    await run.client.delete(names.turns)

    assert await post_forgotten_seals(run.client, run.name) == 0
