"""Dead letters: listed, opened, exported, discarded."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from turnstream.errors import ConflictError
from turnstream.records.events import decode_event
from turnstream.records.turns import decode_turn
from turnstream.store.client.connection import connect_async
from turnstream.types import SealedTrajectory, TrajectoryKey, TrajectoryState
from turnstream_server.bus.admin.dead_letters import (
    DeadLetterNotFoundError,
    discard_event,
    discard_oldest,
    discard_trajectory,
    open_event,
    open_trajectory,
    read_dead_letters,
)
from turnstream_server.bus.queries.budget import read_budget
from turnstream_server.bus.queries.trajectory_history import read_history
from turnstream_server.jobs.dead_letters import export_dead_letter

pytestmark = pytest.mark.redis


async def test_list_has_the_reason_size_and_group_of_each(dead_run: Any) -> None:
    await dead_run.add("g/1/0")
    await dead_run.add("h/0/0")
    dead_run.decide("h", "planned")

    found = read_dead_letters(dead_run.client, dead_run.run)

    one, other = found.trajectories
    assert (one.trajectory_id, one.group_state) == ("g/1/0", "open")
    assert (other.trajectory_id, other.group_state) == ("h/0/0", "planned")
    assert one.reason == "its bytes are damaged"
    assert one.num_bytes + other.num_bytes == found.num_bytes > 200
    assert found.max_bytes == 256 * 1024 * 1024
    dead_run.check()


async def test_open_names_the_defect_of_the_damaged_turn(dead_run: Any) -> None:
    await dead_run.add("g/1/0")

    content = open_trajectory(dead_run.client, dead_run.run, "g/1/0")

    first, second = content.turns
    assert "checksum" in first.problem
    assert second.problem == ""
    assert content.seal is not None
    assert content.seal.key == TrajectoryKey("g", 1)
    assert content.seal_problem == ""


async def test_open_names_a_turn_that_differs_from_the_seal(dead_run: Any) -> None:
    for sample in (0, 1):
        dead_run.publish("g", sample)
    first, second, seal = dead_run.records("g/1/0")
    dead_run.replace("g/1/0", [second, first, seal])
    await dead_run.kill("g/1/0")

    turns = open_trajectory(dead_run.client, dead_run.run, "g/1/0").turns

    assert [each.turn is not None for each in turns] == [True, True]
    assert all("the seal has" in each.problem for each in turns)


async def test_open_names_missing_turns(dead_run: Any) -> None:
    dead_run.publish("g", 1)
    first, _, seal = dead_run.records("g/1/0")
    dead_run.replace("g/1/0", [first, seal])
    await dead_run.kill("g/1/0")

    assert [*open_trajectory(dead_run.client, dead_run.run, "g/1/0").missing] == [1]


async def test_open_names_a_seal_of_another_trajectory(dead_run: Any) -> None:
    for sample in (0, 1):
        dead_run.publish("g", sample)
    dead_run.replace("g/1/0", [*dead_run.records("g/1/0")[:-1], dead_run.records("g/0/0")[-1]])
    await dead_run.kill("g/1/0")

    problem = open_trajectory(dead_run.client, dead_run.run, "g/1/0").seal_problem

    assert problem == "it is of TrajectoryKey(group_id='g', sample=0, attempt=0)"


async def test_trajectory_without_payload_can_be_opened(dead_run: Any) -> None:
    dead_run.publish("g", 1)
    dead_run.replace("g/1/0", [])
    await dead_run.kill("g/1/0")

    content = open_trajectory(dead_run.client, dead_run.run, "g/1/0")

    assert (content.turns, content.seal, content.seal_problem) == ((), None, "nothing is stored")


async def test_living_trajectory_is_no_dead_letter(dead_run: Any) -> None:
    dead_run.publish("g", 1)

    with pytest.raises(DeadLetterNotFoundError, match="no dead letter 'g/1/0'"):
        open_trajectory(dead_run.client, dead_run.run, "g/1/0")


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_export_has_every_byte_and_every_decoded_value(
    dead_run: Any, tmp_path: Path, number: int
) -> None:
    dead_run.publish("g", 1)
    intact = dead_run.records("g/1/0")
    dead_run.damage("g/1/0", number=number, at=-1)
    await dead_run.kill("g/1/0")
    path = tmp_path / "dead.json"

    export_dead_letter(dead_run.url, dead_run.run, "g/1/0", path)

    exported = json.loads(path.read_text())
    parts = [*exported["turns"], exported["seal"]]
    assert [bytes.fromhex(part["record"]) for part in parts] == dead_run.records("g/1/0")
    assert ["checksum" in part["problem"] for part in parts] == [i == number for i in range(3)]
    for part, record in zip(parts[:-1], intact[:-1], strict=True):
        turn = decode_turn(record)
        assert part["content"]["token_ids"] == turn.token_ids.tolist()
        assert part["content"]["logprobs"] == turn.logprobs.tolist()  # type: ignore[union-attr]
        assert part["content"]["version_runs"] == [[1, turn.num_response_tokens]]
    seal = decode_event(intact[-1])
    assert isinstance(seal, SealedTrajectory)
    assert parts[-1]["content"]["payload_crcs"] == [*seal.payload_crcs]
    assert parts[-1]["content"]["reward"] == 1.0
    assert parts[-1]["content"]["tags"] == {"split": "a"}


async def test_export_of_an_unreadable_turn_has_its_bytes(dead_run: Any, tmp_path: Path) -> None:
    dead_run.publish("g", 1)
    dead_run.replace("g/1/0", [b"junk", *dead_run.records("g/1/0")[1:]])
    await dead_run.kill("g/1/0")
    path = tmp_path / "dead.json"

    export_dead_letter(dead_run.url, dead_run.run, "g/1/0", path)

    first, second = json.loads(path.read_text())["turns"]
    assert (bytes.fromhex(first["record"]), first["content"]) == (b"junk", None)
    assert second["content"]["index"] == 1


async def test_discard_keeps_the_reason_and_frees_the_bytes(dead_run: Any) -> None:
    await dead_run.add("g/1/0")
    held = read_budget(dead_run.client, dead_run.run).held.stored

    assert discard_trajectory(dead_run.client, dead_run.run, "g/1/0")
    assert not discard_trajectory(dead_run.client, dead_run.run, "g/1/0")

    history = read_history(dead_run.client, dead_run.run, "g/1/0")
    assert history.state is TrajectoryState.DEAD
    assert history.reason == "discarded: its bytes are damaged"
    assert not history.payload_is_kept
    assert 0 == read_budget(dead_run.client, dead_run.run).held.stored < held
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
    held = read_budget(dead_run.client, dead_run.run).held.stored

    assert not discard_trajectory(dead_run.client, dead_run.run, "g/1/0")

    assert killed.returncode == -signal.SIGKILL
    assert 0 == read_budget(dead_run.client, dead_run.run).held.stored < held
    assert not dead_run.records("g/1/0")
    assert dead_run.entry("g/1/0") == "dead:discarded: its bytes are damaged"
    dead_run.check()


async def test_discard_of_a_living_trajectory_is_refused(dead_run: Any) -> None:
    dead_run.publish("g", 1)

    with pytest.raises(ConflictError, match="not dead"):
        discard_trajectory(dead_run.client, dead_run.run, "g/1/0")

    assert read_history(dead_run.client, dead_run.run, "g/1/0").payload_is_kept


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
    assert left.trajectory_id == "g/2/0"
    assert dead_run.entry("g/0/0") == "dead:discarded for room: its bytes are damaged"
    dead_run.check()


async def test_rejected_event_is_kept_once(dead_run: Any) -> None:
    assert await dead_run.reject("17-1", b"junk")
    assert not await dead_run.reject("17-1", b"junk")

    event = open_event(dead_run.client, dead_run.run, "17-1")
    assert (event.record, event.reason, event.since_ms) == (b"junk", "no event", 17)
    assert discard_event(dead_run.client, dead_run.run, "17-1")
    assert not discard_event(dead_run.client, dead_run.run, "17-1")
    assert not await dead_run.reject("17-1", b"junk")
    found = read_dead_letters(dead_run.client, dead_run.run)
    assert (found.events, found.num_discarded_events, found.num_bytes) == ((), 1, 0)
