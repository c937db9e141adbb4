"""Dead letters of a run that is planned and trained meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from turnstream.errors import ConflictError
from turnstream.records.events import encode_event
from turnstream.records.turns import encode_turn
from turnstream.store import keys
from turnstream.store.connection import connect
from turnstream.store.scripts import Script, run_command
from turnstream.testing import group, sealed, stored_turn, trajectory, turn, wait_until_async
from turnstream.types import GroupOpened, TrajectoryKey, TrajectoryState
from turnstream_server import cli
from turnstream_server.batcher.upkeep import Upkeep
from turnstream_server.bus.histories import read_history
from turnstream_server.bus.ledger import read_ledger
from turnstream_server.bus.letters import read_letters
from turnstream_server.jobs.ledger import ledger_json

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


async def until(predicate: Callable[[], object], describe: str) -> None:
    """Wait for something that the batcher, in this event loop, does."""

    async def ask() -> object:
        return predicate()

    await wait_until_async(ask, describe=describe)


async def command(house: Any, *words: str) -> str:
    """What `turnstream dead <words>` prints."""
    arguments = ["dead", *words, "--redis", house.url]
    shown = await asyncio.to_thread(CliRunner().invoke, cli.app, arguments)
    if shown.exception is not None and not isinstance(shown.exception, SystemExit):
        raise shown.exception
    return shown.output


def damage(house: Any, run: str, key: TrajectoryKey) -> None:
    """Overwrite one byte of its first turn."""
    stream = keys.trajectory_keys(run, keys.trajectory_id(key)).turns
    with connect(house.url) as client:
        entries: Any = client.xrange(stream)
        records = [bytearray(fields[b"r"]) for _, fields in entries]
        records[0][-9] ^= 1
        client.delete(stream)
        for number, record in enumerate(records, start=1):
            client.xadd(stream, {"r": bytes(record)}, id=f"0-{number}")


def letters(house: Any, run: str) -> list[str]:
    """The names of those that are kept."""
    with connect(house.url) as client:
        return [each.trajectory_id for each in read_letters(client, run).letters]


def states(house: Any, run: str) -> dict[TrajectoryState, int]:
    """The states that occur; they must add up."""
    with connect(house.url) as client:
        counts = read_ledger(client, run)
    counts.check()
    return {state: number for state, number in counts.by_state.items() if number}


def group_of_3(group_id: str) -> Any:
    members = [
        trajectory(turn("ab", "CD"), sample=sample, reward=float(sample)) for sample in range(3)
    ]
    return group(group_id, *members)


async def test_a_mended_letter_takes_its_place_in_a_group_that_waits_for_a_refill(
    house: Any, tmp_path: Path
) -> None:
    run = house.create_run(batch_groups=2, deadline_policy="refill", max_refills=1)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, group_of_3("g0"))
    damage(house, run, TrajectoryKey("g0", 1))
    await house.publish(run, group_of_3("g1"))
    await trainer.start()
    await until(lambda: letters(house, run) == ["g0/1/0"], "its death is told")

    fix = tmp_path / "fix.json"
    await command(house, "export", run, "g0/1/0", "--to", str(fix))
    sound = await command(house, "replay", run, "g0/1/0", "--fix", str(fix), "--dry-run")
    said = await command(house, "replay", run, "g0/1/0", "--fix", str(fix))
    (pulled,) = await trainer.get(1)
    again = await command(house, "replay", run, "g0/1/0", "--fix", str(fix))

    assert "nothing was written" in sound
    assert said.startswith("g0/1/0 -> g0/1/1, ")
    assert sorted(pulled.mini_batch.rows.trajectory_id)[:3] == ["g0/0/0", "g0/1/1", "g0/2/0"]
    assert again == "g0/1/0 -> g0/1/1, planned\n"
    assert states(house, run) == {TrajectoryState.PLANNED: 6, TrajectoryState.DEAD: 1}


async def test_a_letter_that_comes_too_late_trains_once_in_a_group_of_its_own(
    house: Any, tmp_path: Path
) -> None:
    run = house.create_run(batch_groups=2)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, group_of_3("g0"))
    damage(house, run, TrajectoryKey("g0", 1))
    await house.publish(run, group_of_3("g1"))
    await trainer.start()
    await trainer.stepped(await trainer.get(1))

    fix = tmp_path / "fix.json"
    await command(house, "export", run, "g0/1/0", "--to", str(fix))
    replay = ["replay", run, "g0/1/0", "--fix", str(fix)]
    with pytest.raises(ConflictError, match="already planned"):
        await command(house, *replay)
    await command(house, *replay, "--as-group", "mended")
    await house.publish(run, group("g2"))
    (pulled,) = await trainer.get(2)

    assert pulled.mini_batch.rows.trajectory_id.count("mended/0/0") == 1
    said = await command(house, *replay, "--as-group", "mended")
    assert said == "g0/1/0 -> mended/0/0, planned\n"
    with pytest.raises(ConflictError, match="replayed as mended/0/0"):
        await command(house, *replay, "--as-group", "again")
    assert states(house, run)[TrajectoryState.DEAD] == 1


async def test_a_replay_that_was_trained_and_released_is_never_done_again(
    house: Any, tmp_path: Path
) -> None:
    # Its ledger entry is gone then, and its group a fingerprint.
    upkeep = Upkeep(snapshot_events=1, snapshot_steps=1, fold_ended=1)
    run = house.create_run(batch_groups=1, retain_checkpoints=1)
    await house.publish(run, group_of_3("g0"))
    damage(house, run, TrajectoryKey("g0", 1))
    trainer = house.trainer(await house.start_batcher(upkeep=upkeep), run)
    await trainer.start()
    await trainer.get(1)
    fix = tmp_path / "fix.json"
    await command(house, "export", run, "g0/1/0", "--to", str(fix))
    replay = ["replay", run, "g0/1/0", "--fix", str(fix), "--as-group", "mended"]
    await command(house, *replay)

    await house.publish(run, *[group(f"h{i}") for i in range(2)])
    for step in range(1, 5):
        await trainer.committed(await trainer.stepped(await trainer.get(step)))
    names = keys.run_keys(run)
    with connect(house.url) as client:
        await until(lambda: not client.hexists(names.ledger, "mended/0/0"), "its release")

    said = await command(house, *replay)
    assert said == "g0/1/0 -> mended/0/0, committed\n"
    for words in ([*replay[:-1], "again"], replay[:-2]):
        with pytest.raises(ConflictError, match="replayed as mended/0/0, which is committed"):
            await command(house, *words)
    with connect(house.url) as client:
        assert not client.hexists(names.groups, "again")
    assert states(house, run)[TrajectoryState.COMMITTED] == 7


async def test_poison_beyond_the_bound_of_the_run_is_discarded_and_counted(house: Any) -> None:
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
    assert (listed["letters"], listed["num_discarded"], listed["num_bytes"]) == ([], 1, 0)
    assert history.state is TrajectoryState.DEAD
    assert history.reason.startswith("discarded for room: the checksum")
    assert states(house, run)[TrajectoryState.DEAD] == 1


async def test_the_command_lists_shows_writes_and_discards(house: Any, tmp_path: Path) -> None:
    run = house.create_run(batch_groups=1)
    await house.publish(run, group_of_3("g0"))
    damage(house, run, TrajectoryKey("g0", 1))
    with connect(house.url) as client:
        client.xadd(keys.run_keys(run).events, {"r": b"junk of nobody"})
    await house.publish(run, group_of_3("g1"))
    trainer = house.trainer(await house.start_batcher(), run)
    await trainer.start()
    await trainer.get(1)

    listed = json.loads(await command(house, "list", run, "--json"))
    shown = json.loads(await command(house, "show", run, "g0/1/0", "--json"))
    (event,) = listed["events"]
    raw, junk = tmp_path / "letter.raw", tmp_path / "event.raw"
    await command(house, "export", run, "g0/1/0", "--to", str(raw))
    await command(house, "export", run, event["event_id"], "--to", str(junk))

    assert [each["trajectory_id"] for each in listed["letters"]] == ["g0/1/0"]
    assert "checksum" in listed["letters"][0]["reason"]
    (flaw,) = shown["turns"][0]["flaws"]
    assert flaw["stop"] - flaw["start"] == 1
    assert junk.read_bytes() == b"junk of nobody"
    assert b"TST" in raw.read_bytes()
    assert "dead letters of" in await command(house, "list", run)
    assert json.loads(ledger_json(house.url, run))["states"]["dead"]["count"] == 1
    assert f"bytes {flaw['start']} to {flaw['stop']}" in await command(house, "show", run, "g0/1/0")
    discarded = await command(house, "discard", run, "g0/1/0", event["event_id"])
    assert discarded == "2 discarded\n"
    assert json.loads(await command(house, "list", run, "--json"))["letters"] == []


async def test_a_damaged_seal_of_a_trajectory_that_awaits_its_reward_is_set_aside(
    house: Any,
) -> None:
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(), run)
    publish_damaged_seal(house, run, lease="1:awaits")
    await house.publish(run, group("g1"))
    await trainer.start()
    (pulled,) = await trainer.get(1)

    assert letters(house, run) == ["g0/0/0"]
    assert set(pulled.mini_batch.rows.group_id) == {"g1"}
    assert states(house, run)[TrajectoryState.DEAD] == 1


async def test_a_letter_that_is_long_gone_does_not_stop_the_next_leader(house: Any) -> None:
    # It hears the damaged event again, of a trajectory that the ledger no longer has.
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
    """A group of one whose seal is damaged before the run is told of it."""
    names, place = keys.run_keys(run), keys.trajectory_keys(run, "g0/0/0")
    record = encode_turn(stored_turn("ab", "CD"))
    seal = encode_event(sealed("g0"))[:-1] + b"x"
    opened = encode_event(GroupOpened(group_id="g0", prompt_uid="", num_samples=1))
    with connect(house.url) as client:
        run_command(
            client, Script("open_group")(names.of_open_group, "g0", 1, "w", opened, "g0/0/0")
        )
        run_command(client, Script("append")(place, "1:w", 0, 1, record, seal))
        run_command(client, Script("post_sealed")(names.of_post_sealed, "g0/0/0", lease, seal))
