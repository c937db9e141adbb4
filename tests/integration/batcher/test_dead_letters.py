"""Dead letters of a run that is being planned and trained."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from testkit import group, sealed, stored_turn, wait_until_async
from turnstream.records.events import encode_event
from turnstream.records.turns import encode_turn
from turnstream.store.client import keys
from turnstream.types import TrajectoryState
from turnstream_server import cli
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.bus.queries.trajectory_history import read_history
from turnstream_server.jobs.ledger import ledger_json

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


async def until(predicate: Callable[[], object], describe: str) -> None:
    """Wait for something that the batcher, in this event loop, does."""
    await wait_until_async(lambda: predicate(), describe=describe)


async def command(house: Any, *words: str) -> str:
    """Return the output of `turnstream dead <words>`."""
    arguments = ["dead", *words, "--redis", house.url]
    shown = await asyncio.to_thread(CliRunner().invoke, cli.app, arguments)
    if shown.exception is not None and not isinstance(shown.exception, SystemExit):
        raise shown.exception
    return shown.output


async def test_dead_letters_above_the_limit_are_discarded_and_counted(
    house: Any, of_3: Any
) -> None:
    upkeep = Upkeep(fold_ended=1)
    run = house.create_run(batch_groups=1, max_dead_bytes=0)
    await house.publish(run, of_3("g0"))
    house.damage(run, "g0/1/0")
    await house.publish(run, of_3("g1"))
    trainer = await house.start_trainer(run, upkeep=upkeep)
    await trainer.get(1)

    payload = keys.trajectory_keys(run, "g0/1/0").turns
    await until(lambda: not house.client.exists(payload), "its payload to be gone")

    name = keys.run_keys(run).ledger
    await until(lambda: not house.client.hexists(name, "g0/1/0"), "its compact record")
    history = read_history(house.client, run, "g0/1/0")

    listed = json.loads(await command(house, "list", run, "--json"))
    assert (listed["trajectories"], listed["num_discarded"], listed["num_bytes"]) == ([], 1, 0)
    assert history.state is TrajectoryState.DEAD
    assert history.reason.startswith("discarded above max_dead_bytes: the checksum")
    assert house.states(run)[TrajectoryState.DEAD] == 1


async def test_commands_list_show_export_and_discard(house: Any, of_3: Any, tmp_path: Path) -> None:
    run = house.create_run(batch_groups=1)
    await house.publish(run, of_3("g0"))
    damaged = house.damage(run, "g0/1/0")
    house.client.xadd(keys.run_keys(run).events, {"r": b"junk of nobody"})
    await house.publish(run, of_3("g1"))
    trainer = await house.start_trainer(run)
    await trainer.get(1)

    listed = json.loads(await command(house, "list", run, "--json"))
    shown = await command(house, "show", run, "g0/1/0", "--json")
    (event,) = listed["events"]
    exported, junk = tmp_path / "dead.json", tmp_path / "event.json"
    await command(house, "export", run, "g0/1/0", "--to", str(exported))
    await command(house, "export", run, event["name"], "--to", str(junk))

    assert [each["name"] for each in listed["trajectories"]] == ["g0/1/0"]
    assert "checksum" in listed["trajectories"][0]["reason"]
    turn_0, _ = json.loads(exported.read_text())["records"]
    assert bytes.fromhex(turn_0["record"]) == damaged
    assert shown == exported.read_text() + "\n"
    assert bytes.fromhex(json.loads(junk.read_text())["records"][0]["record"]) == b"junk of nobody"
    assert "dead letters of" in await command(house, "list", run)
    assert json.loads(ledger_json(house.url, run))["states"]["dead"]["count"] == 1
    assert "checksum" in await command(house, "show", run, "g0/1/0")
    discarded = await command(house, "discard", run, "g0/1/0", event["name"])
    assert discarded == "2 discarded\n"
    assert json.loads(await command(house, "list", run, "--json"))["trajectories"] == []


async def test_damaged_seal_of_a_trajectory_that_awaits_its_reward_is_dead(
    house: Any,
) -> None:
    run, trainer = await house.serve(batch_groups=1)
    publish_damaged_seal(house, run, lease="1:awaits")
    await house.publish(run, group("g1"))
    await trainer.start()
    (pulled,) = await trainer.get(1)

    assert [each.name for each in house.dead_letters(run).trajectories] == ["g0/0/0"]
    assert set(pulled.mini_batch.rows.group_id) == {"g1"}
    assert house.states(run)[TrajectoryState.DEAD] == 1


async def test_discarded_dead_letter_does_not_stop_the_next_leader(house: Any) -> None:
    run = house.create_run(batch_groups=1, max_dead_bytes=0)
    upkeep = Upkeep(fold_ended=1)
    first = await house.start_batcher(upkeep=upkeep)
    publish_damaged_seal(house, run, lease="1")
    await house.publish(run, group("g1"))
    trainer = house.trainer(first, run)
    await trainer.start()
    token = await trainer.stepped(await trainer.get(1))
    names = keys.run_keys(run)
    await until(lambda: not house.client.hexists(names.ledger, "g0/0/0"), "its compact record")
    await first.stop()

    other = house.trainer(await house.start_batcher(upkeep=upkeep), run)
    await house.publish(run, group("g2"))
    await other.start("other", token=str(token))
    (pulled,) = await other.get(2)

    assert set(pulled.mini_batch.rows.group_id) == {"g2"}


def publish_damaged_seal(house: Any, run: str, *, lease: str) -> None:
    """Publish a group of one whose seal is damaged before it is posted."""
    record, seal = encode_turn(stored_turn("ab", "CD")), encode_event(sealed("g0"))[:-1] + b"x"
    house.open_group(run, "g0", "g0/0/0")
    house.seal(run, "g0/0/0", record, seal=seal, lease=lease, posts=True)
