"""Which groups a batch takes by the age of their tokens, on a real store and over real gRPC."""

import asyncio
import contextlib
import dataclasses
from typing import Any

import pytest

from testkit import group, trajectory, turn, wait_until_async
from turnstream.batching.scoring.denominators import check_share
from turnstream.errors import EndOfRunError
from turnstream.generator import Publisher
from turnstream.records.events import decode_event
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.types import Group, TrajectoryState, Turn, VersionAnnounced, VersionRun
from turnstream_server.batcher.planner.upkeep import Upkeep
from turnstream_server.bus.core.frontier import read_frontier
from turnstream_server.bus.queries.ledger import read_ledger

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


def of_version(name: str, version: int) -> Group:
    """A group of two whose tokens one version sampled."""
    members = [
        trajectory(turn("ab", "CD", version=version), sample=sample, reward=float(sample))
        for sample in range(2)
    ]
    return group(name, *members)


def names(pulled: Any) -> list[str]:
    return sorted(set(pulled.mini_batch.rows.group_id))


def announced(url: str, run: str) -> list[int]:
    """The versions whose events are still in the store."""
    with connect(url) as client:
        entries: Any = client.xrange(keys.run_keys(run).events)
    events = [decode_event(fields[b"r"]) for _, fields in entries]
    return [event.version for event in events if isinstance(event, VersionAnnounced)]


async def train(trainer: Any, step: int) -> Any:
    """Pull a step, acknowledge it and announce the version of that number."""
    pulled = await trainer.get(step)
    await trainer.stepped(pulled)
    await trainer.announce_version(step, step=step)
    return pulled[0]


async def test_groups_that_are_too_old_expire_and_make_room_for_fresh_ones(house):
    run = house.create_run(batch_groups=1, max_staleness=1, max_age_policy="drop")
    trainer = house.trainer(await house.start_batcher(), run)
    await trainer.start()
    await trainer.announce_version(0, step=0)
    for step in (1, 2):
        await house.publish(run, of_version(f"g{step}", step - 1))
        await train(trainer, step)

    # Four groups may be live after step 2, and two of them are trained: these are more.
    await house.publish(run, *(of_version(f"late{i}", 0) for i in range(6)), of_version("new", 2))
    fresh = await train(trainer, 3)

    assert names(fresh) == ["new"]
    with connect(house.url) as client:
        ledger = read_ledger(client, run)
        ledger.check()
        assert ledger.by_state[TrajectoryState.EXPIRED] == 12
        assert read_frontier(client, run).num_live_groups == 3


@pytest.mark.parametrize("is_led_anew", [False, True])
async def test_tokens_of_undone_weights_age_from_the_rollback_step(house, is_led_anew):
    # What undone weights had sampled was as old as the first announcement behind the fork.
    run = house.create_run(
        batch_groups=1, max_staleness=2, max_age_policy="drop", retain_checkpoints=5
    )
    replica = await house.start_batcher()
    trainer = house.trainer(replica, run)
    await trainer.start()
    tokens = []
    for step in range(1, 5):
        await house.publish(run, of_version(f"g{step}", step - 1))
        tokens.append(await trainer.stepped(await trainer.get(step)))
        await trainer.committed(tokens[-1])
    await trainer.announce_version(4, step=4)

    await trainer.start("back", token=str(tokens[0]))
    for step in (2, 3, 4):
        await trainer.stepped(await trainer.get(step))
    if is_led_anew:
        await replica.stop()
        trainer = house.trainer(await house.start_batcher(), run)
        trainer.session_epoch = 2
    await house.publish(run, of_version("undone", 4), of_version("new", 5))
    (fresh,) = await trainer.get(5)

    assert names(fresh) == ["new"]


async def test_leader_with_a_snapshot_knows_the_age_of_earlier_versions(house):
    run = house.create_run(batch_groups=1, max_staleness=1, max_age_policy="drop")
    upkeep = Upkeep(snapshot_events=1, snapshot_steps=1)
    first = await house.start_batcher(upkeep=upkeep)
    trainer = house.trainer(first, run)
    await trainer.start()
    await trainer.announce_version(0, step=0)
    last: Any = None
    for step in range(1, 41):  # the store lets go of a hundred events at once
        await house.publish(run, of_version(f"g{step}", step - 1))
        last = await train(trainer, step)
    await wait_until_async(
        lambda: asyncio.to_thread(lambda: 0 not in announced(house.url, run)),
        describe="the announcement of version 0 to be gone",
    )
    await first.stop()

    trainer = house.trainer(await house.start_batcher(upkeep=upkeep), run)
    await trainer.start("later", token=f"v1:main:40:{last.mini_batch.info.manifest_hash}")
    await house.publish(run, of_version("late", 0), of_version("new", 40))
    (fresh,) = await trainer.get(41)

    assert names(fresh) == ["new"]


async def test_the_end_of_a_run_is_reached_where_its_last_groups_expire(house):
    run = house.create_run(
        batch_groups=1, max_staleness=1, max_planned_ahead=0, max_age_policy="drop"
    )
    trainer = house.trainer(await house.start_batcher(), run)
    await trainer.start()
    await trainer.announce_version(0, step=0)
    await house.publish(run, *(of_version(f"g{i}", 0) for i in range(2)))
    await train(trainer, 1)
    await train(trainer, 2)

    await house.publish(run, of_version("late", 0), closes=True)
    with pytest.raises(EndOfRunError):
        await trainer.get(3)


async def test_old_tokens_are_masked_and_the_others_of_their_row_are_trained(house):
    run = house.create_run(batch_groups=1, max_staleness=1, max_age_policy="mask")
    trainer = house.trainer(await house.start_batcher(), run)
    await trainer.start()
    await trainer.announce_version(0, step=0)
    for step in (1, 2):
        await house.publish(run, of_version(f"g{step}", step - 1))
        await train(trainer, step)
    mixed: Turn = dataclasses.replace(
        turn("ab", "CDEF"), version_runs=(VersionRun(0, 1), VersionRun(2, 3))
    )
    members = [
        trajectory(mixed, sample=0, reward=1.0),
        trajectory(turn("ab", "GH", version=0), sample=1, reward=0.0),
    ]

    await house.publish(run, group("g3", *members))
    pulled = await train(trainer, 3)

    info = pulled.mini_batch.info
    assert pulled.rows == ["abcDEF", "abgh"]
    assert pulled.mini_batch.rows.advantage.tolist() == pytest.approx([0.7071, -0.7071], abs=1e-4)
    assert (info.denominators.num_tokens, info.denominators.num_trajectories) == (3, 1)
    assert (info.oldest_version, info.newest_version) == (2, 2)
    check_share(pulled.mini_batch.rows, info.denominators, dp_world_size=1)


@pytest.mark.parametrize(
    ("selection", "expected"),
    [("in_order", "a"), ("oldest_weights", "b"), ("ready_first", "c")],
)
async def test_a_batch_takes_the_group_that_the_run_prefers(house, selection, expected):
    run = house.create_run(batch_groups=1, selection=selection, max_planned_ahead=0)
    trainer = house.trainer(await house.start_batcher(), run)
    await trainer.start()
    await trainer.announce_version(0, step=0)
    await house.publish(run, of_version("first", 0))
    pulled = await trainer.get(1)

    with_groups = {"a": 2, "b": 1, "c": 2}
    await asyncio.to_thread(seal_backwards, house.url, run, with_groups)
    await trainer.stepped(pulled)
    (second,) = await trainer.get(2)

    assert names(second) == [expected]


def seal_backwards(url: str, run: str, version_of: dict[str, int]) -> None:
    """Open these groups in order, and complete them in the opposite order."""
    with Publisher(url, run) as publisher, contextlib.ExitStack() as stack:
        opened = [stack.enter_context(publisher.group(name, 1)) for name in version_of]
        writers = [members.trajectory(0) for members in opened]
        for writer, version in reversed(list(zip(writers, version_of.values(), strict=True))):
            writer.append([1, 2], [3], policy_version=version)
            writer.seal(reward=1.0)
