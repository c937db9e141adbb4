from collections.abc import Callable
from typing import Any

import pytest

from testkit import group, stored_turn, trajectory, turn
from turnstream.errors import CorruptRecordError
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.types import TrajectoryKey, TrajectoryState
from turnstream_server.bus.queries.ledger import read_ledger

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


@pytest.fixture
def replace_records(house):
    """Puts other records into the stream of a trajectory."""

    def replace(run: str, key: TrajectoryKey, change: Callable[[list[bytes]], list[bytes]]) -> None:
        stream = keys.trajectory_keys(run, keys.trajectory_id(key)).turns
        with connect(house.url) as client:
            entries: Any = client.execute_command("XRANGE", stream, "-", "+")
            client.delete(stream)
            for number, record in enumerate(change([f[b"r"] for _, f in entries]), start=1):
                client.execute_command("XADD", stream, f"0-{number}", "r", record)

    return replace


@pytest.fixture
def damage(replace_records):
    """Overwrites one byte in the first turn of a trajectory."""

    def flip(records: list[bytes]) -> list[bytes]:
        first = bytearray(records[0])
        first[-9] ^= 1
        return [bytes(first), *records[1:]]

    return lambda run, key: replace_records(run, key, flip)


async def test_a_damaged_trajectory_is_set_aside_and_its_group_trains_without_it(house, damage):
    run, trainer = await house.serve(batch_groups=2)
    await house.publish(run, _group_of_3("g0"))
    damage(run, TrajectoryKey("g0", sample=1))

    await house.publish(run, group("g1"))
    await trainer.start()
    (pulled,) = await trainer.get(1)

    assert pulled.mini_batch.rows.trajectory_id == ["g0/0/0", "g0/2/0", "g1/0/0", "g1/1/0"]
    assert _states(house, run) == {TrajectoryState.PLANNED: 4, TrajectoryState.DEAD: 1}
    assert "checksum" in _entry(house, run, "g0/1/0")


async def test_a_seal_that_misstates_its_turns_is_set_aside(house):
    run, trainer = await house.serve(batch_groups=2)
    said = stored_turn("ab", "CDE").shape
    house.seal_group_of_one(run, "g0", stored_turn("ab", "CD"), said=said)

    await house.publish(run, group("g1"), group("g2"))
    await trainer.start()
    (pulled,) = await trainer.get(1)

    assert sorted(set(pulled.mini_batch.rows.group_id)) == ["g1", "g2"]
    assert _states(house, run)[TrajectoryState.DEAD] == 1


async def test_a_group_that_damage_leaves_too_small_makes_way_for_the_next(house, damage):
    run, trainer = await house.serve(batch_groups=2)
    await house.publish(run, group("g0"))
    damage(run, TrajectoryKey("g0", sample=1))

    await house.publish(run, group("g1"), group("g2"))
    await trainer.start()
    (pulled,) = await trainer.get(1)

    assert sorted(set(pulled.mini_batch.rows.group_id)) == ["g1", "g2"]
    assert _states(house, run) == {
        TrajectoryState.PLANNED: 4,
        TrajectoryState.INCOMPLETE: 1,
        TrajectoryState.DEAD: 1,
    }


async def test_damage_after_planning_is_reported_to_every_rank(house, damage):
    run = house.create_run(batch_groups=1)
    planner = house.trainer(await house.start_batcher(), run)
    await house.publish(run, group("g0"))
    await planner.start("s", dp_world_size=2)
    await planner.get(1)
    other = house.trainer(await house.start_batcher(), run)  # the first one leads, and keeps rows

    damage(run, TrajectoryKey("g0", sample=1))
    await other.start("s", dp_world_size=2)

    for rank in range(2):
        with pytest.raises(CorruptRecordError, match=r"step 1: .*g0/1/0: .*checksum"):
            await other.get(1, dp_rank=rank)


def _group_of_3(group_id: str):
    members = [
        trajectory(turn("ab", "CD"), sample=sample, reward=float(sample)) for sample in range(3)
    ]
    return group(group_id, *members)


def _states(house, run: str) -> dict[TrajectoryState, int]:
    with connect(house.url) as client:
        ledger = read_ledger(client, run)
    ledger.check()
    return {state: number for state, number in ledger.by_state.items() if number}


def _entry(house, run: str, trajectory_id: str) -> str:
    with connect(house.url) as client:
        entry: Any = client.hget(keys.run_keys(run).ledger, trajectory_id)
    return entry.decode()
