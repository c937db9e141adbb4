"""Damaged payload, plans, snapshots and counters of a run, and its dead letters."""

from typing import Any

import pytest

from testkit import group, sealed, stored_turn, wait_until_async
from turnstream.errors import CorruptRecordError
from turnstream.records.events import encode_event
from turnstream.records.turns import encode_turn
from turnstream.store.client import keys
from turnstream.types import TrajectoryState
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.ledger.queries.trajectory_history import read_history


@pytest.fixture
async def run(cluster):
    """A run of two planned steps, whose batcher is gone."""
    name = cluster.create_run(batch_groups=1)
    batcher = await cluster.start_batcher()
    trainer = cluster.trainer(batcher, name)
    await cluster.publish(name, group("g0"), group("g1"))
    await trainer.start("a")
    await trainer.get(2)
    await batcher.stop()
    return name


async def test_damaged_plan_is_reported_to_ranks_and_by_why(cluster, run):
    def flip(plans: list[bytes]) -> list[bytes]:
        first, second = plans
        return [first, second[:-9] + bytes([second[-9] ^ 1]) + second[-8:]]

    cluster.change_records(keys.run_keys(run).plan, flip)
    trainer = await cluster.start_trainer(run, session="b")

    (first,) = await trainer.get(1)
    with pytest.raises(CorruptRecordError, match="checksum of a manifest"):
        await trainer.get(2)

    assert first.mini_batch.rows.group_id == ["g0", "g0"]
    await wait_until_async(lambda: "the checksum of a manifest record" in cluster.why(run))


async def test_damaged_snapshot_is_reported_and_planned_batches_are_delivered(cluster, run):
    damaged: Any = {"position": "0-0", "step": 0, "record": b"\x00" * 64}
    cluster.client.hset(keys.run_keys(run).snapshot, mapping=damaged)
    trainer = await cluster.start_trainer(run, session="b")

    pulled = [*await trainer.get(1), *await trainer.get(2)]

    assert [each.mini_batch.rows.group_id for each in pulled] == [["g0", "g0"], ["g1", "g1"]]
    await wait_until_async(lambda: "snapshot record" in cluster.why(run))


async def test_dead_letters_above_the_limit_are_discarded_and_counted(
    cluster: Any, of_3: Any
) -> None:
    upkeep = Upkeep(compact_ended=1)
    run = cluster.create_run(batch_groups=1, max_dead_bytes=0)
    await cluster.publish(run, of_3("g0"))
    cluster.damage(run, "g0/1/0")
    await cluster.publish(run, of_3("g1"))
    trainer = await cluster.start_trainer(run, upkeep=upkeep)
    await trainer.get(1)

    payload = keys.trajectory_keys(run, "g0/1/0").turns
    await wait_until_async(
        lambda: not cluster.client.exists(payload), describe="its payload to be gone"
    )

    name = keys.run_keys(run).ledger
    await wait_until_async(
        lambda: not cluster.client.hexists(name, "g0/1/0"), describe="its compact record"
    )
    history = read_history(cluster.client, run, "g0/1/0")

    letters = cluster.dead_letters(run)
    assert (letters.trajectories, letters.num_discarded, letters.num_bytes) == ((), 1, 0)
    assert history.state is TrajectoryState.DEAD
    assert history.reason.startswith("discarded above max_dead_bytes: the checksum")
    assert cluster.states(run)[TrajectoryState.DEAD] == 1


async def test_damaged_seal_of_a_trajectory_that_awaits_its_reward_is_dead(
    cluster: Any,
) -> None:
    run, trainer = await cluster.serve(batch_groups=1)
    publish_damaged_seal(cluster, run, lease="1:awaits")
    await cluster.publish(run, group("g1"))
    await trainer.start()
    (pulled,) = await trainer.get(1)

    assert [each.name for each in cluster.dead_letters(run).trajectories] == ["g0/0/0"]
    assert set(pulled.mini_batch.rows.group_id) == {"g1"}
    assert cluster.states(run)[TrajectoryState.DEAD] == 1


async def test_discarded_dead_letter_does_not_stop_the_next_leader(cluster: Any) -> None:
    run = cluster.create_run(batch_groups=1, max_dead_bytes=0)
    upkeep = Upkeep(compact_ended=1)
    first = await cluster.start_batcher(upkeep=upkeep)
    publish_damaged_seal(cluster, run, lease="1")
    await cluster.publish(run, group("g1"))
    trainer = cluster.trainer(first, run)
    await trainer.start()
    token = await trainer.stepped(await trainer.get(1))
    names = keys.run_keys(run)
    await wait_until_async(
        lambda: not cluster.client.hexists(names.ledger, "g0/0/0"), describe="its compact record"
    )
    await first.stop()

    other = cluster.trainer(await cluster.start_batcher(upkeep=upkeep), run)
    await cluster.publish(run, group("g2"))
    await other.start("other", token=str(token))
    (pulled,) = await other.get(2)

    assert set(pulled.mini_batch.rows.group_id) == {"g2"}


def publish_damaged_seal(cluster: Any, run: str, *, lease: str) -> None:
    """Publish a group of one whose seal is damaged before it is posted."""
    record, seal = encode_turn(stored_turn("ab", "CD")), encode_event(sealed("g0"))[:-1] + b"x"
    cluster.open_group(run, "g0", "g0/0/0")
    cluster.seal(run, "g0/0/0", record, seal=seal, lease=lease)
