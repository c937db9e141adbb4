"""Dead letters: listed, opened, exported, discarded; a damaged counter is refused first."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from testkit import sealed, stored_turn
from turnstream.errors import ConflictError, CorruptRecordError
from turnstream.records.events import encode_event
from turnstream.records.turns import encode_turn
from turnstream.store.client import keys
from turnstream.store.client.scripts import run_command
from turnstream.store.run.groups import reserve_command
from turnstream.types import TrajectoryState
from turnstream_server.console.dead_letters import dead_letter_json
from turnstream_server.ledger.admin.dead_letters import (
    DeadLetterNotFoundError,
    discard_event,
    discard_oldest,
    discard_trajectory,
    open_event,
    open_trajectory,
    read_dead_letters,
)
from turnstream_server.ledger.planning.trajectories import Rejection, reject_events
from turnstream_server.ledger.queries.trajectory_history import read_history

TURN = encode_turn(stored_turn("ab", "CD", logprobs=[-0.5, -0.25]))
SEAL = encode_event(sealed("g", sample=0, tags={"split": "a"}))


def damaged(record: bytes) -> bytes:
    """Return a record with one bit flipped."""
    return record[:-1] + bytes([record[-1] ^ 1])


async def publish(run: Any, name: str, *records: bytes) -> None:
    """Seal a trajectory with these records."""
    key = keys.parse_trajectory_id(name)
    await run.open(key.group_id, num_samples=3)
    await run.append(*(records or (damaged(TURN), SEAL)), trajectory_id=name, seals=True)
    await run.seal(key.group_id, key.sample)


async def add(run: Any, name: str, *records: bytes) -> None:
    """Seal a trajectory with these records, and mark it as dead."""
    await publish(run, name, *records)
    key = keys.parse_trajectory_id(name)
    assert await run.kill(key.group_id, key.sample)


async def reject(run: Any, event_id: str, record: bytes, *names: str) -> None:
    """Reject an event as a leader does, once for each trajectory that it names."""
    if not run.store.xrange(run.keys.events, event_id, event_id):
        run.store.xadd(run.keys.events, {"r": record}, id=event_id)
    named = [keys.parse_trajectory_id(each) for each in names] or [None]
    await reject_events(run.term, [Rejection(event_id, "no event", each) for each in named])


def num_records(run: Any, name: str) -> int:
    return run.store.xlen(keys.trajectory_keys(run.name, name).turns)


async def test_list_has_the_reason_and_size_of_each(run: Any) -> None:
    await add(run, "g/1/0")
    await add(run, "h/0/0")

    found = read_dead_letters(run.store, run.name)

    one, other = found.trajectories
    assert (one.name, other.name) == ("g/1/0", "h/0/0")
    assert one.reason == "checksum"
    assert one.num_bytes + other.num_bytes == found.num_bytes > 200
    assert found.max_bytes == 256 * 1024 * 1024
    run.ledger().check()


async def test_living_trajectory_is_no_dead_letter(run: Any) -> None:
    await publish(run, "g/1/0")

    with pytest.raises(DeadLetterNotFoundError, match="no dead letter 'g/1/0'"):
        open_trajectory(run.store, run.name, "g/1/0")
    async with run.refuses(ConflictError, "not dead"):
        discard_trajectory(run.store, run.name, "g/1/0")
    assert num_records(run, "g/1/0") == 2


@pytest.mark.parametrize("records", [(damaged(TURN), SEAL), (TURN, damaged(SEAL))])
async def test_export_has_every_byte_and_every_decoded_value(
    server: Any, run: Any, records: tuple[bytes, bytes]
) -> None:
    await add(run, "g/0/0", *records)

    parts = json.loads(dead_letter_json(server.url, run.name, "g/0/0"))["records"]

    intact = [record in (TURN, SEAL) for record in records]
    assert [bytes.fromhex(part["record"]) for part in parts] == [*records]
    assert ["checksum" not in part["problem"] for part in parts] == intact
    assert [part["content"] is not None for part in parts] == intact
    if records[0] == TURN:
        assert parts[0]["content"]["token_ids"] == [97, 98, 99, 100]
        assert parts[0]["content"]["logprobs"] == [-0.5, -0.25]
    else:
        assert parts[1]["content"]["reward"] == 1.0
        assert parts[1]["content"]["tags"] == {"split": "a"}


async def test_dead_letter_whose_payload_is_lost_is_shown(run: Any) -> None:
    await add(run, "g/0/0")
    run.store.delete(keys.trajectory_keys(run.name, "g/0/0").turns)

    letter, (seal,) = open_trajectory(run.store, run.name, "g/0/0")

    assert (letter.reason, seal.record, seal.content) == ("checksum", b"", None)


@pytest.mark.both_servers
async def test_discard_keeps_the_reason_and_frees_the_bytes(run: Any) -> None:
    await add(run, "g/1/0")
    held = run.held().stored

    assert discard_trajectory(run.store, run.name, "g/1/0")
    assert not discard_trajectory(run.store, run.name, "g/1/0")
    await run.release("g/1/0")

    history = read_history(run.store, run.name, "g/1/0")
    assert (history.state, history.reason) == (TrajectoryState.DEAD, "discarded: checksum")
    assert num_records(run, "g/1/0") == 0
    assert 0 == run.held().stored < held
    found = read_dead_letters(run.store, run.name)
    assert (found.trajectories, found.num_discarded, found.num_bytes) == ((), 1, 0)
    with pytest.raises(DeadLetterNotFoundError):
        open_trajectory(run.store, run.name, "g/1/0")
    run.ledger().check()


async def test_second_discard_completes_a_killed_one(server: Any, run: Any) -> None:
    await add(run, "g/1/0")
    words = ("dead", "discard", run.name, "g/1/0", "--redis", server.url)
    command = [sys.executable, "-P", "-m", "turnstream_server.cli", *words]
    environment = os.environ | {"TURNSTREAM_FAILPOINT": "discard.after_entry"}
    killed = await asyncio.to_thread(subprocess.run, command, env=environment, check=False)

    assert not discard_trajectory(run.store, run.name, "g/1/0")

    assert killed.returncode == -signal.SIGKILL
    assert num_records(run, "g/1/0") == 0
    assert (await run.hash_of("ledger"))[b"g/1/0"] == b"dead:discarded: checksum"
    run.ledger().check()


async def test_oldest_dead_letters_are_discarded_above_the_limit(run: Any) -> None:
    for sample in range(3):
        await add(run, f"g/{sample}/0")
    *_, newest = read_dead_letters(run.store, run.name).trajectories

    num_discarded = await discard_oldest(run.client, run.name, max_bytes=newest.num_bytes)

    assert num_discarded == 2
    assert read_dead_letters(run.store, run.name).trajectories == (newest,)
    entry = (await run.hash_of("ledger"))[b"g/0/0"]
    assert entry == b"dead:discarded above max_dead_bytes: checksum"
    run.ledger().check()


EVENT = f"{2**52}-1"


@pytest.mark.both_servers
async def test_rejected_event_is_kept_once(run: Any) -> None:
    await reject(run, EVENT, b"junk")
    async with run.unchanged():
        await reject(run, EVENT, b"junk")

    event, (record,) = open_event(run.store, run.name, EVENT)
    assert (record.record, event.reason, event.since_ms) == (b"junk", "no event", 2**52)
    assert discard_event(run.store, run.name, EVENT)
    assert not discard_event(run.store, run.name, EVENT)
    async with run.unchanged():
        await reject(run, EVENT, b"junk")


async def test_rejected_event_of_a_sealed_trajectory_is_its_dead_letter(run: Any) -> None:
    await publish(run, "g/0/0")
    run.store.zadd(run.keys.deadlines, {"reward:g/0/0": 9})
    await reject(run, EVENT, b"junk", "g/0/0", "g/0/0", "g/1/0")
    async with run.unchanged():
        await reject(run, EVENT, b"junk", "g/0/0")
    await reject(run, f"{2**52}-2", b"junk", "g/0/0")

    found = read_dead_letters(run.store, run.name)
    assert [(each.name, each.reason) for each in found.trajectories] == [("g/0/0", "no event")]
    assert [each.name for each in found.events] == [EVENT]  # g/1/0 is not sealed
    assert not run.store.exists(run.keys.deadlines)
    run.ledger().check()


async def test_event_before_the_newest_rejected_one_is_rejected_unkept(run: Any) -> None:
    # The server takes no entry before the newest one, not even after that one is discarded.
    early = f"{2**51}-1"
    run.store.xadd(run.keys.events, {"r": b"junk"}, id=early)
    await reject(run, EVENT, b"junk")
    assert discard_event(run.store, run.name, EVENT)

    await reject(run, early, b"junk")

    assert read_dead_letters(run.store, run.name).events == ()
    assert run.store.zcard(run.keys.rejected) == 2


@pytest.mark.parametrize("field", ["dead_bytes", "dead"])
async def test_damaged_counter_is_refused_before_a_dead_letter_changes(
    run: Any, field: str
) -> None:
    # HINCRBY once failed after the dead letter was removed: its bytes stayed in the count.
    await add(run, "g/0/0")
    await publish(run, "g/1/0")
    run.store.xadd(run.keys.events, {"r": b"no record"}, id=EVENT)
    count = run.store.hget(run.keys.counts, field)
    run.store.hset(run.keys.counts, field, b"\xc5")
    words = f"damaged: .*:counts, field '{field}'"

    async with run.refuses(CorruptRecordError, words):
        discard_trajectory(run.store, run.name, "g/0/0")
    async with run.refuses(CorruptRecordError, words):
        await reject(run, EVENT, b"no record", "g/1/0")

    run.store.hset(run.keys.counts, field, count)
    assert discard_trajectory(run.store, run.name, "g/0/0")


async def test_reserve_in_a_run_with_a_damaged_counter_writes_nothing(run: Any) -> None:
    await publish(run, "g/0/0")
    run.store.hset(run.keys.budget, "reserved", "much")

    command = reserve_command(run.name, [("g/1/0", 1, 10**6)], writer="w")
    async with run.refuses(CorruptRecordError, r"budget, field 'reserved': .much"):
        run_command(run.store, command)
