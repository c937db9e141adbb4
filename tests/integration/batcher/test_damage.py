"""Damaged payload, plans, snapshots and counters of a run, and its dead letters."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from testkit import group, sealed, stored_turn, wait_until_async
from turnstream.errors import CorruptRecordError, WaitKind, WaitReason
from turnstream.records.events import encode_event
from turnstream.records.turns import encode_turn
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.waits.wait_reasons import reasons
from turnstream.types import TrajectoryState
from turnstream_server import cli
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.bus.core.frontier import read_frontier
from turnstream_server.bus.queries.run_snapshot import read_snapshot
from turnstream_server.bus.queries.trajectory_history import read_history
from turnstream_server.jobs.ledger import read_run_ledger


async def test_group_too_small_after_damage_is_replaced_by_the_next(house):
    run, trainer = await house.serve(batch_groups=2)
    await house.publish(run, group("g0"))
    house.damage(run, "g0/1/0")

    await house.publish(run, group("g1"), group("g2"))
    await trainer.start()
    (pulled,) = await trainer.get(1)

    assert sorted(set(pulled.mini_batch.rows.group_id)) == ["g1", "g2"]
    assert "checksum" in house.dead_letters(run).trajectories[0].reason
    assert house.states(run) == {
        TrajectoryState.PLANNED: 4,
        TrajectoryState.INCOMPLETE: 1,
        TrajectoryState.DEAD: 1,
    }


async def test_damage_after_planning_is_reported_to_every_rank(house):
    run = house.create_run(batch_groups=1)
    planner = house.trainer(await house.start_batcher(), run)
    await house.publish(run, group("g0"))
    await planner.start("s", dp_world_size=2)
    await planner.get(1)
    other = house.trainer(await house.start_batcher(), run)  # the first one leads, and keeps rows

    house.damage(run, "g0/1/0")
    await other.start("s", dp_world_size=2)

    for rank in range(2):
        with pytest.raises(CorruptRecordError, match=r"step 1: .*g0/1/0: .*checksum"):
            await other.get(1, dp_rank=rank)


@pytest.fixture
async def run(house):
    """A run of two planned steps, whose batcher is gone."""
    name = house.create_run(batch_groups=1)
    batcher = await house.start_batcher()
    trainer = house.trainer(batcher, name)
    await house.publish(name, group("g0"), group("g1"))
    await trainer.start("a")
    await trainer.get(2)
    await batcher.stop()
    return name


async def trouble(url: str, run: str) -> str:
    """Why the run is not planned, as soon as a batcher says it."""

    def found() -> list[WaitReason]:
        with connect(url) as client:
            return reasons(read_snapshot(client, run))

    await wait_until_async(lambda: any(each.kind is WaitKind.PLANNING_FAILS for each in found()))
    return next(each.sentence for each in found() if each.kind is WaitKind.PLANNING_FAILS)


async def test_damaged_plan_is_reported_to_ranks_and_by_why(house, run):
    def flip(plans: list[bytes]) -> list[bytes]:
        first, second = plans
        return [first, second[:-9] + bytes([second[-9] ^ 1]) + second[-8:]]

    house.change_records(keys.run_keys(run).plan, flip)
    trainer = await house.start_trainer(run, session="b")

    (first,) = await trainer.get(1)
    with pytest.raises(CorruptRecordError, match="checksum of a manifest"):
        await trainer.get(2)

    assert first.mini_batch.rows.group_id == ["g0", "g0"]
    assert "the checksum of a manifest record" in await trouble(house.url, run)


async def test_damaged_snapshot_is_reported_and_planned_batches_are_delivered(house, run):
    damaged: Any = {"position": "0-0", "step": 0, "record": b"\x00" * 64}
    house.client.hset(keys.run_keys(run).snapshot, mapping=damaged)
    trainer = await house.start_trainer(run, session="b")

    pulled = [*await trainer.get(1), *await trainer.get(2)]

    assert [each.mini_batch.rows.group_id for each in pulled] == [["g0", "g0"], ["g1", "g1"]]
    assert "snapshot record" in await trouble(house.url, run)


DAMAGE = b"\xc5"


async def until_named(house: Any, run: str, words: str) -> None:
    """Until `turnstream why` says these words, in a reason or as its error."""

    async def is_named() -> bool:
        try:
            found = [reason.sentence for reason in reasons(read_snapshot(house.client, run))]
        except CorruptRecordError as error:
            found = [str(error)]
        return any(words in sentence for sentence in found)

    await wait_until_async(is_named, describe=f"a reason that says {words}")


@pytest.mark.parametrize(("part", "field"), [("counts", "sealed"), ("budget", "stored")])
async def test_step_is_planned_whole_after_a_damaged_counter_is_repaired(
    house: Any, part: str, field: str
) -> None:
    run = house.create_run(batch_groups=1)
    await house.publish(run, group("g0"))
    names = keys.run_keys(run)
    count: Any = house.client.hget(getattr(names, part), field)
    house.client.hset(getattr(names, part), field, DAMAGE)

    trainer = house.trainer(await house.start_batcher(), run)
    await until_named(house, run, f"damaged: {getattr(names, part)}, field '{field}'")
    assert (house.client.xlen(names.plan), read_frontier(house.client, run).planned) == (0, 0)
    house.client.hset(getattr(names, part), field, count)

    await trainer.start()
    (pulled,) = await trainer.get(1, wait_s=30)
    assert {*pulled.mini_batch.rows.trajectory_id} == {"g0/0/0", "g0/1/0"}


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
    await wait_until_async(
        lambda: not house.client.exists(payload), describe="its payload to be gone"
    )

    name = keys.run_keys(run).ledger
    await wait_until_async(
        lambda: not house.client.hexists(name, "g0/1/0"), describe="its compact record"
    )
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
    assert read_run_ledger(house.url, run)["states"]["dead"]["count"] == 1
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
    await wait_until_async(
        lambda: not house.client.hexists(names.ledger, "g0/0/0"), describe="its compact record"
    )
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
    house.seal(run, "g0/0/0", record, seal=seal, lease=lease)
