"""Dead letters: listed, opened, exported, discarded."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from turnstream.errors import ConflictError
from turnstream.records.turns import decode_turn
from turnstream.store.client.connection import connect_async
from turnstream.types import StoredTurn, TrajectoryState
from turnstream_server.bus.admin.dead_letters import (
    DeadLetterNotFoundError,
    discard_event,
    discard_oldest,
    discard_trajectory,
    open_event,
    open_trajectory,
    read_dead_letters,
)
from turnstream_server.bus.queries.ledger import read_budget
from turnstream_server.bus.queries.trajectory_history import read_history
from turnstream_server.jobs.dead_letters import dead_letter_json

pytestmark = pytest.mark.redis


async def test_list_has_the_reason_and_size_of_each(dead_run: Any) -> None:
    await dead_run.add("g/1/0")
    await dead_run.add("h/0/0")

    found = read_dead_letters(dead_run.client, dead_run.run)

    one, other = found.trajectories
    assert (one.name, other.name) == ("g/1/0", "h/0/0")
    assert one.reason == "its bytes are damaged"
    assert one.num_bytes + other.num_bytes == found.num_bytes > 200
    assert found.max_bytes == 256 * 1024 * 1024
    dead_run.check()


async def test_open_names_a_turn_that_differs_from_the_seal(dead_run: Any) -> None:
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
    dead_run: Any, kept: list[str], problems: list[str]
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


async def test_living_trajectory_is_no_dead_letter(dead_run: Any) -> None:
    dead_run.publish("g", 1)

    with pytest.raises(DeadLetterNotFoundError, match="no dead letter 'g/1/0'"):
        open_trajectory(dead_run.client, dead_run.run, "g/1/0")


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_export_has_every_byte_and_every_decoded_value(dead_run: Any, number: int) -> None:
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


async def test_discard_keeps_the_reason_and_frees_the_bytes(dead_run: Any) -> None:
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
async def test_second_discard_completes_a_killed_one(dead_run: Any, failpoint: str) -> None:
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


async def test_discard_of_a_living_trajectory_is_refused(dead_run: Any) -> None:
    dead_run.publish("g", 1)

    with pytest.raises(ConflictError, match="not dead"):
        discard_trajectory(dead_run.client, dead_run.run, "g/1/0")

    assert dead_run.records("g/1/0")


async def test_oldest_dead_letters_are_discarded_above_the_limit(dead_run: Any) -> None:
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


async def test_rejected_event_is_kept_once(dead_run: Any) -> None:
    assert await dead_run.reject("17-1", b"junk")
    assert not await dead_run.reject("17-1", b"junk")

    event, (record,) = open_event(dead_run.client, dead_run.run, "17-1")
    assert (record.record, event.reason, event.since_ms) == (b"junk", "no event", 17)
    assert discard_event(dead_run.client, dead_run.run, "17-1")
    assert not discard_event(dead_run.client, dead_run.run, "17-1")
    assert not await dead_run.reject("17-1", b"junk")
    found = read_dead_letters(dead_run.client, dead_run.run)
    assert (found.events, found.num_bytes) == ((), 0)
