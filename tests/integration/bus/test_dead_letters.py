"""Dead letters: listed, opened, exported, discarded; a damaged counter is refused first."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import redis

from testkit import ids
from turnstream.errors import ConflictError, CorruptRecordError
from turnstream.generator import Publisher
from turnstream.records.turns import decode_turn
from turnstream.store.client import keys
from turnstream.store.client.connection import connect_async
from turnstream.store.client.scripts import run_command
from turnstream.store.run.budget import reserve_command
from turnstream.types import StoredTurn, TrajectoryDied, TrajectoryState
from turnstream_server.bus.admin.dead_letters import (
    DeadLetterNotFoundError,
    discard_event,
    discard_oldest,
    discard_trajectory,
    open_event,
    open_trajectory,
    read_dead_letters,
)
from turnstream_server.bus.leadership.leadership import Term, acquire_leadership
from turnstream_server.bus.planning.trajectories import Rejection, mark_dead, reject_events
from turnstream_server.bus.queries.ledger import read_budget, read_ledger
from turnstream_server.bus.queries.trajectory_history import read_history
from turnstream_server.jobs.dead_letters import dead_letter_json


class DeadRun:
    """A run whose trajectories can be published, damaged and marked as dead."""

    def __init__(self, url: str, client: redis.Redis, run: str) -> None:
        self.url = url
        self.client = client
        self.run = run
        self.names = keys.run_keys(run)
        self._epoch = 0

    def publish(self, group_id: str, sample: int, *, num_samples: int = 3) -> None:
        """Publish a sample of two turns."""
        with Publisher(self.url, self.run, writer="generator") as publisher:
            writer = publisher.trajectory(
                group_id, sample, num_samples=num_samples, prompt_uid="uid"
            )
            writer.append(
                ids("ab"), ids("CD"), logprobs=[-0.5, -0.25], policy_version=1, anchor="room 3"
            )
            writer.append(ids("abCDe"), ids("F"), logprobs=[-1.0], policy_version=1)
            writer.seal(float(sample), tags={"split": "a"})

    def records(self, trajectory_id: str) -> list[bytes]:
        """Return the stored records of a trajectory, its seal last."""
        stream = keys.trajectory_keys(self.run, trajectory_id).turns
        entries: Any = self.client.xrange(stream)
        return [fields[b"r"] for _, fields in entries]

    def replace(self, trajectory_id: str, records: list[bytes]) -> None:
        """Store other records of a trajectory."""
        stream = keys.trajectory_keys(self.run, trajectory_id).turns
        self.client.delete(stream)
        for number, record in enumerate(records, start=1):
            self.client.xadd(stream, {"r": record}, id=f"0-{number}")

    def damage(self, trajectory_id: str, *, number: int = 0, at: int = -9) -> None:
        """Flip one bit of a record."""
        records = self.records(trajectory_id)
        damaged = bytearray(records[number])
        damaged[at] ^= 1
        records[number] = bytes(damaged)
        self.replace(trajectory_id, records)

    async def kill(self, *trajectory_ids: str, reason: str = "its bytes are damaged") -> None:
        """Mark trajectories as dead, as a leader does."""
        async with connect_async(self.url) as client:
            epoch = await self._lead(client)
            for name in trajectory_ids:
                died = TrajectoryDied(key=keys.parse_trajectory_id(name), reason=reason)
                await mark_dead(Term(client, self.run, epoch), died)

    async def reject(self, event_id: str, record: bytes) -> bool:
        """Reject an event, as a leader does; return whether it is new."""
        async with connect_async(self.url) as client:
            epoch = await self._lead(client)
            if not self.client.xrange(self.names.events, event_id, event_id):
                self.client.xadd(self.names.events, {"r": record}, id=event_id)
            rejection = Rejection(event_id, "no event", None)
            return bool(await reject_events(Term(client, self.run, epoch), [rejection]))

    async def add(self, name: str) -> None:
        """Publish a trajectory, damage its first turn, and mark it as dead."""
        key = keys.parse_trajectory_id(name)
        self.publish(key.group_id, key.sample)
        self.damage(name)
        await self.kill(name)

    def entry(self, name: str) -> str:
        """Return the ledger entry of a trajectory."""
        entry: Any = self.client.hget(self.names.ledger, name)
        return (entry or b"").decode()

    def check(self) -> None:
        """Check that the states of the ledger add up."""
        read_ledger(self.client, self.run).check()

    async def _lead(self, client: Any) -> int:
        if not self._epoch:
            leadership = await acquire_leadership(client, self.run, owner="test", lease_s=60)
            self._epoch = leadership.epoch
        return self._epoch


@pytest.fixture
def dead_run(server: Any, client: redis.Redis, new_run: Callable[..., str]) -> DeadRun:
    return DeadRun(server.url, client, new_run(client))


async def test_list_has_the_reason_and_size_of_each(dead_run: DeadRun) -> None:
    await dead_run.add("g/1/0")
    await dead_run.add("h/0/0")

    found = read_dead_letters(dead_run.client, dead_run.run)

    one, other = found.trajectories
    assert (one.name, other.name) == ("g/1/0", "h/0/0")
    assert one.reason == "its bytes are damaged"
    assert one.num_bytes + other.num_bytes == found.num_bytes > 200
    assert found.max_bytes == 256 * 1024 * 1024
    dead_run.check()


async def test_open_names_a_turn_that_differs_from_the_seal(dead_run: DeadRun) -> None:
    dead_run.publish("g", 1)
    first, second, seal = dead_run.records("g/1/0")
    dead_run.replace("g/1/0", [second, first, seal])
    await dead_run.kill("g/1/0")

    *turns, last = open_trajectory(dead_run.client, dead_run.run, "g/1/0").records

    assert [isinstance(each.content, StoredTurn) for each in turns] == [True, True]
    assert all("the seal has" in each.problem for each in turns)
    assert last.problem == ""


OTHER = "it is not the seal of TrajectoryKey(group_id='g', sample=1, attempt=0)"


@pytest.mark.parametrize(
    ("kept", "problems"),
    [
        (["g/1/0#0", "g/1/0#2"], ["", "is not stored", ""]),
        (["g/1/0#0", "g/1/0#1", "g/0/0#2"], ["", "", OTHER]),
        (["g/1/0#0", "g/1/0#1", "g/1/0#1"], ["", "", "no event record: it begins with b'TST'"]),
        ([], ["is not stored"]),
    ],
)
async def test_open_names_missing_turns_and_a_wrong_seal(
    dead_run: DeadRun, kept: list[str], problems: list[str]
) -> None:
    stored: dict[str, bytes] = {}
    for sample in (0, 1):
        dead_run.publish("g", sample)
        records = dead_run.records(f"g/{sample}/0")
        stored |= {f"g/{sample}/0#{number}": record for number, record in enumerate(records)}
    dead_run.replace("g/1/0", [stored[name] for name in kept])
    await dead_run.kill("g/1/0")

    records = open_trajectory(dead_run.client, dead_run.run, "g/1/0").records

    assert [each.problem for each in records] == problems


async def test_living_trajectory_is_no_dead_letter(dead_run: DeadRun) -> None:
    dead_run.publish("g", 1)

    with pytest.raises(DeadLetterNotFoundError, match="no dead letter 'g/1/0'"):
        open_trajectory(dead_run.client, dead_run.run, "g/1/0")


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_export_has_every_byte_and_every_decoded_value(
    dead_run: DeadRun, number: int
) -> None:
    dead_run.publish("g", 1)
    intact = dead_run.records("g/1/0")
    dead_run.damage("g/1/0", number=number, at=-1)
    await dead_run.kill("g/1/0")

    parts = json.loads(dead_letter_json(dead_run.url, dead_run.run, "g/1/0"))["records"]

    assert [bytes.fromhex(part["record"]) for part in parts] == dead_run.records("g/1/0")
    assert ["checksum" in part["problem"] for part in parts] == [i == number for i in range(3)]
    assert [part["content"] is None for part in parts] == [i == number for i in range(3)]
    for part, record in zip(parts[:-1], intact[:-1], strict=True):
        if part["content"] is not None:
            turn = decode_turn(record)
            assert part["content"]["token_ids"] == turn.token_ids.tolist()
            assert part["content"]["logprobs"] == turn.logprobs.tolist()  # type: ignore[union-attr]
    if number != 2:
        assert parts[-1]["content"]["reward"] == 1.0
        assert parts[-1]["content"]["tags"] == {"split": "a"}


async def test_discard_keeps_the_reason_and_frees_the_bytes(dead_run: DeadRun) -> None:
    await dead_run.add("g/1/0")
    held = read_budget(dead_run.client, dead_run.run).stored

    assert discard_trajectory(dead_run.client, dead_run.run, "g/1/0")
    assert not discard_trajectory(dead_run.client, dead_run.run, "g/1/0")

    history = read_history(dead_run.client, dead_run.run, "g/1/0")
    assert history.state is TrajectoryState.DEAD
    assert history.reason == "discarded: its bytes are damaged"
    assert not dead_run.records("g/1/0")
    assert 0 == read_budget(dead_run.client, dead_run.run).stored < held
    found = read_dead_letters(dead_run.client, dead_run.run)
    assert (found.trajectories, found.num_discarded, found.num_bytes) == ((), 1, 0)
    with pytest.raises(DeadLetterNotFoundError):
        open_trajectory(dead_run.client, dead_run.run, "g/1/0")
    dead_run.check()


@pytest.mark.parametrize("failpoint", ["discard.after_entry", "discard.after_payload"])
async def test_second_discard_completes_a_killed_one(dead_run: DeadRun, failpoint: str) -> None:
    await dead_run.add("g/1/0")
    words = ("dead", "discard", dead_run.run, "g/1/0", "--redis", dead_run.url)
    command = [sys.executable, "-P", "-m", "turnstream_server.cli", *words]
    environment = os.environ | {"TURNSTREAM_FAILPOINT": failpoint}
    killed = await asyncio.to_thread(subprocess.run, command, env=environment, check=False)
    held = read_budget(dead_run.client, dead_run.run).stored

    assert not discard_trajectory(dead_run.client, dead_run.run, "g/1/0")

    assert killed.returncode == -signal.SIGKILL
    assert 0 == read_budget(dead_run.client, dead_run.run).stored < held
    assert not dead_run.records("g/1/0")
    assert dead_run.entry("g/1/0") == "dead:discarded: its bytes are damaged"
    dead_run.check()


async def test_discard_of_a_living_trajectory_is_refused(dead_run: DeadRun) -> None:
    dead_run.publish("g", 1)

    with pytest.raises(ConflictError, match="not dead"):
        discard_trajectory(dead_run.client, dead_run.run, "g/1/0")

    assert dead_run.records("g/1/0")


async def test_oldest_dead_letters_are_discarded_above_the_limit(dead_run: DeadRun) -> None:
    for sample in range(3):
        await dead_run.add(f"g/{sample}/0")
    kept = read_dead_letters(dead_run.client, dead_run.run)

    async with connect_async(dead_run.url) as client:
        num_discarded = await discard_oldest(
            client, dead_run.run, max_bytes=kept.trajectories[-1].num_bytes
        )

    assert num_discarded == 2
    (left,) = read_dead_letters(dead_run.client, dead_run.run).trajectories
    assert left.name == "g/2/0"
    assert dead_run.entry("g/0/0") == "dead:discarded above max_dead_bytes: its bytes are damaged"
    dead_run.check()


async def test_rejected_event_is_kept_once(dead_run: DeadRun) -> None:
    assert await dead_run.reject("17-1", b"junk")
    assert not await dead_run.reject("17-1", b"junk")

    event, (record,) = open_event(dead_run.client, dead_run.run, "17-1")
    assert (record.record, event.reason, event.since_ms) == (b"junk", "no event", 17)
    assert discard_event(dead_run.client, dead_run.run, "17-1")
    assert not discard_event(dead_run.client, dead_run.run, "17-1")
    assert not await dead_run.reject("17-1", b"junk")
    found = read_dead_letters(dead_run.client, dead_run.run)
    assert (found.events, found.num_bytes) == ((), 0)


EVENT = f"{2**52}-1"


def contents(dead_run: DeadRun) -> dict[bytes, bytes | None]:
    """Every key of the run, but the clock, as it is stored."""
    found: Any = dead_run.client.keys(f"*{dead_run.run}*")
    return {key: dead_run.client.dump(key) for key in found}


@pytest.mark.parametrize("field", ["dead_bytes", "dead"])
async def test_damaged_counter_is_refused_before_a_dead_letter_changes(
    dead_run: DeadRun, field: str
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


def test_reserve_in_a_run_with_a_damaged_counter_writes_nothing(dead_run: DeadRun) -> None:
    dead_run.publish("g", 0)
    dead_run.client.hset(dead_run.names.budget, "reserved", "much")
    before = contents(dead_run)

    command = reserve_command(dead_run.run, [("g/1/0", 1, 10**6)])
    with pytest.raises(CorruptRecordError, match=r"budget, field 'reserved': .much"):
        run_command(dead_run.client, command)

    assert contents(dead_run) == before
