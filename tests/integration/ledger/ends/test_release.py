"""Released steps: their payload, their events, and files of old records."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from testkit.runs.scripts import script
from turnstream.errors import FencedError, ReleasedError, RunNotFoundError, TurnstreamError
from turnstream.store.client import keys
from turnstream.store.client.scripts import run_command_async
from turnstream.types import RecoveryToken
from turnstream_server.ledger.leadership.leader_fields import save_snapshot, trim_events
from turnstream_server.ledger.leadership.writes import Difference, write
from turnstream_server.ledger.release.release import read_release_state
from turnstream_server.ledger.release.release_writes import WatermarkFacts, advance
from turnstream_server.ledger.sessions.observers import (
    declare_observer,
    forget_observers,
    note_observed,
)


@pytest.mark.parametrize(("fields", "floor"), [({"retain_checkpoints": 1}, 4), ({}, 3)])
async def test_the_newest_revision_says_how_many_checkpoints_are_kept_or_two_are(
    run: Any, fields: dict[str, int], floor: int
) -> None:
    await run.plan_steps(4)
    await run.commit(await run.start("s"), 2, 3, 4)
    revision = json.loads((await run.hash_of("config"))[b"1"])
    del revision["retain_checkpoints"]
    newer = {"newest": 2, "2": json.dumps({**revision, **fields})}
    await run.client.hset(run.keys.config, mapping=newer)

    assert await run.advance_watermark() == floor


async def test_a_live_observer_keeps_what_it_has_not_seen_until_it_expires(run: Any) -> None:
    where = (run.client, run.name)
    await run.plan_steps(4)
    await declare_observer(*where, observer="eval", first_step=1, expiry_s=60)
    await declare_observer(*where, observer="gone", first_step=1, expiry_s=0.001)
    await run.commit(await run.start("s"), 2, 3, 4)

    assert await run.advance_watermark() == 0
    await note_observed(*where, observer="eval", seen=2)
    after_ms = await run.run_ms() + 1_000
    await forget_observers(run.term, run_ms=after_ms)
    assert await run.advance_watermark() == 2
    await note_observed(*where, observer="eval", seen=4)
    assert await run.advance_watermark() == 3


@pytest.mark.both_servers
async def test_observer_that_is_declared_meanwhile_keeps_what_it_has_not_seen(run: Any) -> None:
    await run.plan_steps(3)
    await run.commit(await run.start("s"), 1, 2, 3)
    fields = await run.hash_of("frontier")
    facts = WatermarkFacts(
        released=None,
        checkpoints=fields[b"checkpoints"],
        revision=1,
        num_kept=2,
        observers={},
    )
    floor, changes = advance(facts, at_most=None)
    await declare_observer(run.client, run.name, observer="late", first_step=1, expiry_s=60)

    assert changes is not None
    async with run.unchanged():
        found = await write(run.term, changes)

    assert floor == 2
    assert found == Difference(run.keys.observers, "size", b"1")


async def test_an_observer_cannot_begin_with_what_is_released(released: Any) -> None:
    where = (released.client, released.name)

    with pytest.raises(ReleasedError, match="step 2 is no longer retained: the oldest batch kept"):
        await declare_observer(*where, observer="late", first_step=2, expiry_s=60)

    assert await declare_observer(*where, observer="late", first_step=3, expiry_s=60) == (3, 0)


async def test_token_below_the_watermark_is_refused(released: Any) -> None:
    async with released.refuses(ReleasedError, r"names step 1, but the steps up to 2 are"):
        await released.start("later", released.token(1))
    async with released.refuses(ReleasedError, "names step 0"):
        await released.start("later", RecoveryToken(lineage="main", step=0, chain_hash=""))


async def test_token_at_the_watermark_is_accepted_after_folding(released: Any) -> None:
    for step in (1, 2):
        await released.compact(step)

    session = await released.start("later", released.token(2))

    assert session.next_step == 3


async def test_a_checkpoint_that_was_rolled_back_no_longer_counts(released: Any) -> None:
    session = await released.start("later", released.token(2))
    assert await released.advance_watermark() == 2

    await released.commit(session, 4)

    assert await released.advance_watermark() == 2  # the checkpoints are 2 and 4


async def test_released_payload_leaves_a_tombstone_that_refuses_late_writers(run: Any) -> None:
    await run.append(b"turn one", lease="1:w")

    await run.release("g/0/0")
    await run.release("g/0/0")

    names = keys.trajectory_keys(run.name, "g/0/0")
    assert await run.client.exists(names.turns) == 0
    assert await run.client.hgetall(names.meta) == {b"released": b"over"}
    assert 0 < await run.client.pttl(names.meta) <= 900_000
    for lease in ("1", "1:w", "2:other"):
        with pytest.raises(FencedError, match="released"):
            await run.append(b"turn two", lease=lease)


@pytest.mark.parametrize(("lease_s", "longest_ms"), [(1.0, 900_000), (600.0, 9_000_000)])
async def test_a_tombstone_outlives_the_leases_of_its_run(
    run: Any, lease_s: float, longest_ms: int
) -> None:
    await run.release("g/0/0", lease_s=lease_s)

    left_ms = await run.client.pttl(keys.trajectory_keys(run.name, "g/0/0").meta)

    assert longest_ms - 60_000 < left_ms <= longest_ms


async def test_a_tombstone_stays_as_it_was_when_the_payload_is_released_again(run: Any) -> None:
    # A deletion that a planner's release meets must not say otherwise than what was said first.
    names = keys.trajectory_keys(run.name, "g/0/0")
    await run.release("g/0/0", lease_s=600.0)

    command = script("release_payload")(names, 1_000, "abandoned")
    reply = await run_command_async(run.client, command)

    assert reply == 0
    assert await run.client.hgetall(names.meta) == {b"released": b"over"}
    assert await run.client.pttl(names.meta) > 8_000_000


async def test_after_the_tombstone_the_ledger_refuses_the_seal(released: Any) -> None:
    await released.compact(1)

    (reply,) = await released.seal("g1", 0)

    assert reply.startswith(b"FENCED [unknown] g1/0/0 was never opened, or is finished")


async def test_more_payload_than_one_call_takes_is_deleted_and_released(run: Any) -> None:
    ids = [f"g/{sample}/0" for sample in range(300)]
    await run.open("g", num_samples=300)
    for trajectory_id in ids:
        await run.client.hset(keys.trajectory_keys(run.name, trajectory_id).meta, "written", 1)

    await run.release(*ids)

    metas = [
        await run.client.hgetall(keys.trajectory_keys(run.name, trajectory_id).meta)
        for trajectory_id in ids
    ]
    assert metas == [{b"released": b"over"}] * 300
    assert await run.hash_of("payload_bytes") == {}
    assert run.held().held == 0


async def test_released_bytes_leave_the_sum_they_were_counted_in(run: Any) -> None:
    await run.plan_steps(1)
    await run.open("a", num_samples=3)
    await run.seal("a", 1)
    await run.seal("a", 2)
    await run.client.hdel(run.keys.ledger, "a/2/0")  # it counts as stored without an entry
    parts = []

    for members in (["g1/0/0", "g1/1/0"], ["a/0/0"], ["a/1/0", "a/2/0"]):
        await run.release(*members)
        held = run.held()
        parts.append((held.planned > 0, held.reserved > 0, held.stored > 0))

    assert parts == [(False, True, True), (False, False, True), (False, False, False)]
    assert (held.planned, held.reserved, held.stored) == (0, 0, 0)


@pytest.mark.both_servers
async def test_events_go_up_to_the_snapshot_before_and_not_beyond(run: Any) -> None:
    for number in range(150):
        await run.open(f"g{number}")
    entries = await run.client.xrange(run.keys.events)
    position = entries[120][0].decode()
    term = run.term

    for each in (position, position, entries[140][0].decode()):
        assert await trim_events(term) == 0
        await save_snapshot(term, position=each, step=0, record=b"")
    while await trim_events(term):
        pass

    kept = await run.client.xrange(run.keys.events)
    assert kept == entries[len(entries) - len(kept) :]
    assert 30 <= len(kept) < 150


@pytest.mark.parametrize(("position", "step"), [("9-5", 4), ("10-0", 1), ("10-3", 2)])
async def test_a_snapshot_that_comes_late_replaces_no_later_one(
    run: Any, position: str, step: int
) -> None:
    # The leader that led before leads with the same epoch again, which fences no call of its own:
    # one from before its pause put the snapshot back, behind events that were trimmed.
    term = run.term
    await save_snapshot(term, position="10-1", step=2, record=b"first")
    await save_snapshot(term, position="10-3", step=3, record=b"newest")

    await save_snapshot(term, position=position, step=step, record=b"late")

    kept = await run.client.hgetall(run.keys.snapshot)
    assert kept == {b"position": b"10-3", b"step": b"3", b"record": b"newest", b"before": b"10-1"}


async def test_a_run_that_is_gone_has_no_state_of_its_release(run: Any) -> None:
    with pytest.raises(RunNotFoundError, match="no run named 'x'"):
        await read_release_state(run.client, "x")


async def test_bytes_stay_held_if_their_payload_could_not_be_removed(run: Any) -> None:
    await run.open("a")
    meta = keys.trajectory_keys(run.name, "a/0/0").meta
    await run.client.set(meta, "no hash")

    with pytest.raises(TurnstreamError, match="WRONGTYPE"):
        await run.release("a/0/0")

    await run.client.delete(meta)
    assert b"a/0/0" in await run.hash_of("payload_bytes")


FOLDER = Path(__file__).parents[4] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("group_size", [8, 1])
def test_finished_trajectory_stays_within_its_limit_of_bytes(
    group_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    benchmark = importlib.import_module("ledger")

    committed, untrained = benchmark.measure(group_size=group_size, trajectories=50_000)

    assert committed.memory_usage <= benchmark.LIMITS_BYTES[group_size]
    assert untrained.memory_usage <= benchmark.LIMITS_BYTES[group_size]
