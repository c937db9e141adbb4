"""Rejected events and the leaders that follow: all of them pass over the same events."""

import asyncio
import random
import signal
from dataclasses import replace
from typing import Any, cast

import pytest

from testkit import group, sealed, wait_until_async
from turnstream.batching.fold.readiness import RunFold
from turnstream.batching.merge.plan import Manifest
from turnstream.errors import EndOfRunError
from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.run.runs import close_run
from turnstream.types import (
    TrajectoryKey,
)
from turnstream_server.batcher.planner import chain
from turnstream_server.batcher.planner.snapshotting import Upkeep
from turnstream_server.ledger.planning.manifests import read_plan

SEAL = encode_event(sealed("elsewhere", sample=1))
SNAPSHOTS = Upkeep(snapshot_events=1, snapshot_steps=1)


def entries(seed: int = 7) -> list[dict[bytes, bytes]]:
    """Entries that no release can read: records that are cut off, and some with strange fields."""
    found = [{b"r": SEAL[:place] + end} for place in range(len(SEAL)) for end in (b"", b"x")]
    chance = random.Random(seed)
    for _ in range(16):
        name = bytes(chance.choices(range(256), k=3))
        found += [{name: SEAL}, {b"r": SEAL, b"t": name}]
    chance.shuffle(found)
    return found


def write_events(cluster: Any, run: str, found: list[Any]) -> list[str]:
    """Write entries past every check; their ids."""
    pipeline = cluster.client.pipeline(transaction=False)
    for fields in found:
        words = [word for pair in fields.items() for word in pair]
        pipeline.execute_command("XADD", keys.run_keys(run).events, "*", *words)
    ids: Any = pipeline.execute()
    return [event_id.decode() for event_id in ids]


def chain_of(cluster: Any, run: str, steps: int) -> list[tuple[str, Manifest]]:
    plans = [read_plan(cluster.client, run, step) for step in range(1, steps + 1)]
    return [(each.hash, each.manifest) for each in plans if each is not None]


def contents(plans: list[tuple[str, Manifest]]) -> list[Manifest]:
    """The plans without the ids of the events that killed members: each store has its own."""
    return [replace(each, last_event_id="", previous_hash="") for _, each in plans]


def rejected(cluster: Any, run: str) -> set[str]:
    found: Any = cluster.client.zrange(keys.run_keys(run).rejected, 0, -1)
    return {event_id.decode() for event_id in found}


def trouble(cluster: Any, run: str) -> bytes | None:
    found: Any = cluster.client.hget(keys.run_keys(run).leader, "planning_trouble")
    return found


def saved(cluster: Any) -> dict[Any, Any]:
    names: Any = cluster.client.keys("*")
    return {name: cluster.client.dump(name) for name in names}


def restore(cluster: Any, store: dict[Any, Any]) -> None:
    cluster.client.flushall()
    for name, value in store.items():
        cluster.client.restore(name, 0, value)


async def damaged_run(cluster: Any, of_3: Any) -> str:
    """A run of three groups with damaged events around, and in, them."""
    run = cluster.create_run(batch_groups=1, max_planned_ahead=2)
    events = keys.run_keys(run).events
    for number in range(3):
        write_events(cluster, run, entries(number)[:40])
        await cluster.publish(run, of_3(f"g{number}"))
    (entry,) = cast("list[Any]", cluster.client.xrevrange(events, count=1))  # the last seal of g2
    cluster.client.xdel(events, entry[0])
    cluster.client.xadd(events, {"r": entry[1][b"r"][:-1], "t": entry[1][b"t"]})
    return run


async def test_damaged_events_stop_neither_a_planner_nor_its_successor(cluster: Any) -> None:
    run = cluster.create_run(batch_groups=1, max_planned_ahead=3)
    found = entries()
    ids = write_events(cluster, run, found[::2])
    await cluster.publish(run, group("g0"))
    first = await cluster.start_batcher(upkeep=SNAPSHOTS)
    await cluster.planned(run, 1)
    await first.stop()

    first_half = set(ids)
    ids += write_events(cluster, run, found[1::2])
    await cluster.publish(run, group("g1"))
    await cluster.start_batcher(upkeep=SNAPSHOTS)
    await cluster.planned(run, 2)

    await wait_until_async(
        lambda: not rejected(cluster, run) & first_half,
        describe="decisions below the snapshots removed",
    )

    assert not trouble(cluster, run)
    names = [[each.group_id for each in plan.groups] for _, plan in chain_of(cluster, run, 2)]
    assert names == [["g0"], ["g1"]]
    assert {each.name for each in cluster.dead_letters(run).events} == {*ids}


@pytest.mark.parametrize(
    "failpoint",
    ["reject.before", "reject.after", "reject.after@2", "plan.before_write", "plan.after_write"],
)
async def test_killed_leader_is_followed_by_one_with_the_same_plans(
    cluster: Any, start_batcher_process: Any, of_3: Any, failpoint: str
) -> None:
    run = await damaged_run(cluster, of_3)
    before = saved(cluster)
    undisturbed = await cluster.start_batcher()
    await cluster.planned(run, 3)
    await undisturbed.stop()
    expected, decided = chain_of(cluster, run, 3), rejected(cluster, run)

    restore(cluster, before)
    if failpoint == "reject.after@2":  # the second leader folds from a snapshot
        await cluster.start_batcher(upkeep=SNAPSHOTS)
    else:
        process = start_batcher_process(failpoint)
        assert await asyncio.to_thread(process.wait, 60) == -signal.SIGKILL
        partial = chain_of(cluster, run, 3)
        await cluster.start_batcher()
        assert chain_of(cluster, run, 3)[: len(partial)] == partial
    await cluster.planned(run, 3)

    assert contents(chain_of(cluster, run, 3)) == contents(expected)
    assert rejected(cluster, run) == decided
    assert not trouble(cluster, run)


async def test_successor_of_another_release_skips_what_was_rejected(
    cluster: Any, of_3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cluster.create_run(batch_groups=2, max_planned_ahead=0)
    await cluster.publish(run, of_3("bad"), of_3("g1"))
    seal = RunFold._seal  # pyright: ignore[reportPrivateUsage]
    hashes: list[Any] = []

    def fails(self: RunFold, event_id: str, event: Any) -> Any:
        decisions = seal(self, event_id, event)
        if event.key == TrajectoryKey("bad", 1):
            raise ZeroDivisionError("a defect of this release")
        return decisions

    async def hold(manifest: Manifest) -> None:
        hashes.append(manifest)
        await asyncio.Event().wait()

    async def is_drafted() -> bool:
        return bool(hashes)

    with monkeypatch.context() as patched:
        patched.setattr(RunFold, "_seal", fails)
        first = await cluster.start_batcher(before_write=hold)
        await wait_until_async(is_drafted, describe="a plan drafted")
        await first.stop()
    await cluster.start_batcher()
    await cluster.planned(run, 1)

    ((_, manifest),) = chain_of(cluster, run, 1)
    assert manifest == hashes[0]
    members = {each.key for found in manifest.groups for each in found.trajectories}
    assert TrajectoryKey("bad", 0) in members
    assert TrajectoryKey("bad", 1) not in members
    (dead,) = cluster.dead_letters(run).trajectories
    assert dead.name == "bad/1/0"
    assert "a defect of this release" in dead.reason


async def test_trajectory_that_cannot_be_planned_is_set_aside(
    cluster: Any, of_3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cluster.create_run(batch_groups=2)
    await cluster.publish(run, of_3("bad"), of_3("g1"))
    plan_batch = chain.plan_batch

    def fails(ready: Any, **words: Any) -> Manifest:
        if any(each.key == TrajectoryKey("bad", 1) for one in ready for each in one.members):
            raise ValueError("Value out of range: 8589934590")
        return plan_batch(ready, **words)

    monkeypatch.setattr(chain, "plan_batch", fails)
    await cluster.start_batcher()
    await cluster.planned(run, 1)

    ((_, manifest),) = chain_of(cluster, run, 1)
    assert [len(each.trajectories) for each in manifest.groups] == [2, 3]
    (dead,) = cluster.dead_letters(run).trajectories
    assert dead.name == "bad/1/0"
    assert "Value out of range" in dead.reason


async def test_lack_of_memory_rejects_nothing(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cluster.create_run(batch_groups=1)
    await cluster.publish(run, group("g0"))

    def fails(*_: Any) -> Any:
        raise MemoryError("not enough")

    with monkeypatch.context() as patched:
        patched.setattr(RunFold, "_seal", fails)
        first = await cluster.start_batcher(lease_s=0.5)

        await wait_until_async(
            lambda: trouble(cluster, run) == b"not enough", describe="why the run is not planned"
        )
        await first.stop()
    await cluster.start_batcher()
    await cluster.planned(run, 1)

    assert rejected(cluster, run) == set()
    letters = cluster.dead_letters(run)
    assert letters.trajectories == letters.events == ()


async def test_closed_run_ends_although_a_planned_seal_is_rejected_later(cluster: Any) -> None:
    # The successor kept the group open, so that the run never ended.
    run = cluster.create_run(batch_groups=1)
    await cluster.publish(run, group("g0"))
    first = await cluster.start_batcher(lease_s=0.5)
    trainer = cluster.trainer(first, run)
    await trainer.start()
    pulled = await trainer.get(1, wait_s=15)
    await first.stop()
    events = keys.run_keys(run).events
    cluster.change_records(events, lambda records: [*records[:-1], records[-1][:-1]])

    await trainer.move_to((await cluster.start_batcher()).address)
    await trainer.stepped(pulled)
    close_run(cluster.client, run)

    with pytest.raises(EndOfRunError):
        await trainer.get(2, wait_s=15)
    assert len(cluster.dead_letters(run).events) == 1
