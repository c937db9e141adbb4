"""Dead letters of a run that is being planned and trained."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from testkit import group, sealed, stored_turn, trajectory, turn, wait_until_async
from testkit.scripts import script
from turnstream.records.events import encode_event
from turnstream.records.turns import encode_turn
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.client.scripts import run_command
from turnstream.types import GroupOpened, TrajectoryKey, TrajectoryState
from turnstream_server import cli
from turnstream_server.batcher.planner.upkeep import Upkeep
from turnstream_server.bus.admin.dead_letters import read_dead_letters
from turnstream_server.bus.queries.ledger import read_ledger
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


def damage(house: Any, run: str, key: TrajectoryKey) -> bytes:
    """Flip one bit of the first turn; return its damaged record."""
    stream = keys.trajectory_keys(run, keys.trajectory_id(key)).turns
    with connect(house.url) as client:
        entries: Any = client.xrange(stream)
        records = [bytearray(fields[b"r"]) for _, fields in entries]
        records[0][-9] ^= 1
        client.delete(stream)
        for number, record in enumerate(records, start=1):
            client.xadd(stream, {"r": bytes(record)}, id=f"0-{number}")
    return bytes(records[0])


def dead(house: Any, run: str) -> list[str]:
    """Return the names of the dead trajectories that are kept."""
    with connect(house.url) as client:
        return [each.name for each in read_dead_letters(client, run).trajectories]


def states(house: Any, run: str) -> dict[TrajectoryState, int]:
    """Return the number of trajectories by state; the sum must be right."""
    with connect(house.url) as client:
        counts = read_ledger(client, run)
    counts.check()
    return {state: number for state, number in counts.by_state.items() if number}


def group_of_3(group_id: str) -> Any:
    members = [
        trajectory(turn("ab", "CD"), sample=sample, reward=float(sample)) for sample in range(3)
    ]
    return group(group_id, *members)


async def test_dead_letters_above_the_limit_are_discarded_and_counted(house: Any) -> None:
    upkeep = Upkeep(fold_ended=1)
    run = house.create_run(batch_groups=1, max_dead_bytes=0)
    await house.publish(run, group_of_3("g0"))
    damage(house, run, TrajectoryKey("g0", 1))
    await house.publish(run, group_of_3("g1"))
    trainer = house.trainer(await house.start_batcher(upkeep=upkeep), run)
    await trainer.start()
    await trainer.get(1)

    payload = keys.trajectory_keys(run, "g0/1/0").turns
    with connect(house.url) as client:
        await until(lambda: not client.exists(payload), "its payload to be gone")

        name = keys.run_keys(run).ledger
        await until(lambda: not client.hexists(name, "g0/1/0"), "its compact record")
        history = read_history(client, run, "g0/1/0")

    listed = json.loads(await command(house, "list", run, "--json"))
    assert (listed["trajectories"], listed["num_discarded"], listed["num_bytes"]) == ([], 1, 0)
    assert history.state is TrajectoryState.DEAD
    assert history.reason.startswith("discarded above max_dead_bytes: the checksum")
    assert states(house, run)[TrajectoryState.DEAD] == 1


async def test_commands_list_show_export_and_discard(house: Any, tmp_path: Path) -> None:
    run = house.create_run(batch_groups=1)
    await house.publish(run, group_of_3("g0"))
    damaged = damage(house, run, TrajectoryKey("g0", 1))
    with connect(house.url) as client:
        client.xadd(keys.run_keys(run).events, {"r": b"junk of nobody"})
    await house.publish(run, group_of_3("g1"))
    trainer = house.trainer(await house.start_batcher(), run)
    await trainer.start()
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

    assert dead(house, run) == ["g0/0/0"]
    assert set(pulled.mini_batch.rows.group_id) == {"g1"}
    assert states(house, run)[TrajectoryState.DEAD] == 1


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
    with connect(house.url) as client:
        await until(lambda: not client.hexists(names.ledger, "g0/0/0"), "its compact record")
    await first.stop()

    other = house.trainer(await house.start_batcher(upkeep=upkeep), run)
    await house.publish(run, group("g2"))
    await other.start("other", token=str(token))
    (pulled,) = await other.get(2)

    assert set(pulled.mini_batch.rows.group_id) == {"g2"}


def publish_damaged_seal(house: Any, run: str, *, lease: str) -> None:
    """Publish a group of one whose seal is damaged before it is posted."""
    names, place = keys.run_keys(run), keys.trajectory_keys(run, "g0/0/0")
    record = encode_turn(stored_turn("ab", "CD"))
    seal = encode_event(sealed("g0"))[:-1] + b"x"
    opened = encode_event(GroupOpened(group_id="g0", prompt_uid="", num_samples=1))
    with connect(house.url) as client:
        run_command(
            client,
            script("open_group")(names.of_open_group, "g0", 1, "w", opened, "g0/0/0"),
        )
        run_command(
            client,
            script("append")(place, "1:w", 0, 1, record, seal),
        )
        run_command(
            client,
            script("post_sealed")(names.of_post_sealed, "g0/0/0", lease, seal),
        )
