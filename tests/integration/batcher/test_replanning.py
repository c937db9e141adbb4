"""Plans whose payload was damaged after they were made: withdrawn, and made again without it."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from turnstream.batching.plan import Manifest
from turnstream.errors import (
    ConflictError,
    CorruptRecordError,
    EndOfRunError,
    FencedError,
    StoreBehindError,
)
from turnstream.records.events import decode_event, encode_event
from turnstream.store import keys
from turnstream.store.connection import connect, connect_async
from turnstream.store.life import pause_run, resume_run
from turnstream.store.revisions import read_revisions, revise_config
from turnstream.store.rewards import post_reward
from turnstream.testing import group, trajectory, turn, wait_until_async
from turnstream.types import SealedTrajectory, TrajectoryKey, TrajectoryState
from turnstream_server.batcher.listener import RunListener
from turnstream_server.batcher.upkeep import Upkeep
from turnstream_server.bus.budget import read_budget
from turnstream_server.bus.forks import fork_run
from turnstream_server.bus.frontier import Frontier, read_frontier
from turnstream_server.bus.ledger import read_ledger
from turnstream_server.bus.letters import read_letters
from turnstream_server.bus.manifests import read_plan
from turnstream_server.bus.observers import declare_observer, note_observed
from turnstream_server.bus.reasons import Reason, ReasonKind, reasons
from turnstream_server.bus.replans import Replanned, await_replan, request_replan
from turnstream_server.bus.waits import read_snapshot
from turnstream_server.jobs.history import RunHistory

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


@pytest.fixture
def damage(house):
    """Overwrites one byte of the first turn, or of another record, of a trajectory."""

    def flip(run: str, key: TrajectoryKey, *, record: int = 0) -> None:
        stream = keys.trajectory_keys(run, keys.trajectory_id(key)).turns
        with connect(house.url) as client:
            entries: Any = client.xrange(stream)
            client.delete(stream)
            for number, (entry_id, fields) in enumerate(entries):
                stored = bytearray(fields[b"r"])
                if number == record % len(entries):
                    stored[-9] ^= 1
                client.xadd(stream, {"r": bytes(stored)}, id=entry_id)

    return flip


@pytest.fixture
def replan(house):
    """Asks for it, and waits for the answer."""

    def ask(run: str, step: int | None = None) -> Replanned:
        with connect(house.url) as client:
            return await_replan(client, run, request_replan(client, run, step=step), wait_s=10)

    return lambda run, **where: asyncio.to_thread(ask, run, **where)


async def test_two_steps_are_planned_again_without_a_damaged_member(house, damage, replan):
    run = house.create_run(batch_groups=2)
    first = await house.start_batcher()
    trainer = house.trainer(first, run)
    await house.publish(run, _of_3("g0"), group("g1"), group("g2"), group("g3"))
    await trainer.start("a")
    before = await trainer.get(2)
    damage(run, TrajectoryKey("g0", sample=1))

    done = await replan(run)
    await trainer.start("b")
    pulled = [*await trainer.get(1), *await trainer.get(2)]

    assert (done.first_step, done.newest_step, done.dead) == (1, 2, ("g0/1/0",))
    assert [each.mini_batch.rows.trajectory_id for each in pulled] == [
        ["g0/0/0", "g0/2/0", "g1/0/0", "g1/1/0"],
        ["g2/0/0", "g2/1/0", "g3/0/0", "g3/1/0"],
    ]
    assert pulled[1].mini_batch.info.manifest_hash != before[0].mini_batch.info.manifest_hash
    assert [each.mini_batch.info.revision for each in pulled] == [1, 1]
    assert _states(house, run) == {TrajectoryState.PLANNED: 8, TrajectoryState.DEAD: 1}
    assert "checksum" in _letters(house, run)["g0/1/0"]


async def test_a_short_step_that_is_planned_again_counts_in_the_capacity_as_it_is_now(
    house, damage, replan
):
    run = house.create_run(batch_groups=2)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, group("g0"), group("g1"), _of_3("g2"), closes=True)
    await trainer.start("a")
    await trainer.get(2)
    before = _frontier(house, run)
    damage(run, TrajectoryKey("g2", sample=1))

    await replan(run)
    await trainer.start("b")
    (pulled,) = await trainer.get(2)

    after = _frontier(house, run)
    assert pulled.mini_batch.rows.trajectory_id == ["g2/0/0", "g2/2/0"]
    assert before.num_revised_groups == after.num_revised_groups == -1
    assert before.num_live_groups == after.num_live_groups


async def test_a_group_that_is_too_small_without_its_dead_makes_way_for_the_next(
    house, damage, replan
):
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, group("g0"), group("g1"), group("g2"))
    await trainer.start("a")
    await trainer.get(2)
    damage(run, TrajectoryKey("g0", sample=0))

    await replan(run)
    await trainer.start("b")
    pulled = [*await trainer.get(1), *await trainer.get(2)]

    assert [each.mini_batch.rows.group_id for each in pulled] == [["g1", "g1"], ["g2", "g2"]]
    assert _states(house, run) == {
        TrajectoryState.PLANNED: 4,
        TrajectoryState.INCOMPLETE: 1,
        TrajectoryState.DEAD: 1,
    }
    await _until(lambda: _sum_held(house, run, "incomplete") == 0)
    assert _held(house, run) == (0, _sum_held(house, run, "planned"), _sum_held(house, run, "dead"))


async def test_a_group_whose_seals_are_all_damaged_is_left_out_whole(house, damage, replan):
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, group("g0"), group("g1"), group("g2"))
    await trainer.start("a")
    await trainer.get(2)
    damage(run, TrajectoryKey("g0", sample=0))
    damage(run, TrajectoryKey("g1", sample=0), record=-1)
    damage(run, TrajectoryKey("g1", sample=1), record=-1)

    done = await replan(run)
    await trainer.start("b")
    (pulled,) = await trainer.get(1)

    assert set(done.dead) == {"g0/0/0", "g1/0/0", "g1/1/0"}
    assert "its seal cannot be read" in _letters(house, run)["g1/1/0"]
    assert pulled.mini_batch.rows.group_id == ["g2", "g2"]
    assert _states(house, run) == {
        TrajectoryState.PLANNED: 2,
        TrajectoryState.INCOMPLETE: 1,
        TrajectoryState.DEAD: 3,
    }


async def test_a_group_that_teaches_nothing_without_its_dead_is_filtered(house, damage, replan):
    run = house.create_run(batch_groups=1, drop_zero_variance=True)
    trainer = house.trainer(await house.start_batcher(), run)
    rewards = (1.0, 0.0, 0.0)
    odd = group(
        "g0", *[trajectory(turn("ab", "CD"), sample=s, reward=r) for s, r in enumerate(rewards)]
    )
    await house.publish(run, odd, group("g1"))
    await trainer.start("a")
    await trainer.get(2)
    damage(run, TrajectoryKey("g0", sample=0))

    await replan(run)
    await trainer.start("b")
    (pulled,) = await trainer.get(1)

    assert pulled.mini_batch.rows.group_id == ["g1", "g1"]
    assert _states(house, run)[TrajectoryState.FILTERED] == 2


async def test_the_session_is_over_and_another_goes_on_behind_what_was_stepped(
    house, damage, replan, caplog
):
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, group("g0"), _of_3("g1"), group("g2"))
    await trainer.start("a")
    first = await trainer.get(1)
    token = await trainer.stepped(first)
    await trainer.committed(token)
    old = await trainer.get(2)
    damage(run, TrajectoryKey("g1", sample=2))

    with caplog.at_level(logging.WARNING):
        done = await replan(run)
    with pytest.raises(FencedError, match="plans were withdrawn"):
        await trainer.get(2)
    with pytest.raises(FencedError, match="plans were withdrawn"):
        await trainer.get(9, previous_hash=old[0].mini_batch.info.manifest_hash)
    with pytest.raises(FencedError):
        await trainer.stepped(old)
    with pytest.raises(FencedError):
        await trainer.start("a", token=str(token))
    await trainer.start("b", token=str(token))
    second = await trainer.get(2)
    await trainer.stepped(second)
    third = await trainer.get(3)
    await trainer.stepped(third)

    assert (done.first_step, done.newest_step) == (2, 3)
    assert "plans of steps 2 to 3 are withdrawn" in caplog.text
    trained = [each.mini_batch.rows for each in (*first, *second, *third)]
    assert [rows.trajectory_id for rows in trained] == [
        ["g0/0/0", "g0/1/0"],
        ["g1/0/0", "g1/1/0"],
        ["g2/0/0", "g2/1/0"],
    ]
    ids = [row_id for rows in trained for row_id in rows.row_id]
    assert ids == list(range(6))
    assert _chain(house, run) == [1, 2, 3]
    assert _states(house, run)[TrajectoryState.DEAD] == 1


async def test_a_step_that_is_stepped_stays_as_it_was_planned(house, damage, replan):
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, group("g0"), group("g1"))
    await trainer.start("a")
    await trainer.stepped(await trainer.get(1))
    damage(run, TrajectoryKey("g0", sample=0))
    before = _digest(house, run)

    with pytest.raises(ConflictError, match="step 1 is stepped"):
        await replan(run, step=1)
    with pytest.raises(ConflictError, match="step 3 is not planned; 2 are"):
        await replan(run, step=3)
    with pytest.raises(ConflictError, match="no payload of steps 2 to 2 is damaged"):
        await replan(run)
    with pytest.raises(ConflictError, match="no payload of step 2 is damaged"):
        await replan(run, step=2)

    assert _digest(house, run) == before


async def test_a_second_call_changes_nothing(house, damage, replan):
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, _of_3("g0"), group("g1"))
    await trainer.start("a")
    await trainer.get(2)
    damage(run, TrajectoryKey("g0", sample=0))

    both = await asyncio.gather(replan(run), replan(run), return_exceptions=True)
    await trainer.start("b")
    await trainer.get(2)
    before = _digest(house, run)
    with pytest.raises(ConflictError, match="no payload of steps 1 to 2 is damaged"):
        await replan(run)

    assert sum(isinstance(each, Replanned) for each in both) >= 1
    assert _digest(house, run) == before


@pytest.mark.parametrize("selection", ["ready_first", "in_order"])
async def test_a_leader_that_begins_behind_the_withdrawal_plans_what_the_one_before_would_have(
    house, damage, replan, selection
):
    # One leader goes on itself. The other is gone right after, as a pause lets us see.
    runs = [
        house.create_run(batch_groups=2, selection=selection, drop_zero_variance=True)
        for _ in range(2)
    ]
    first = await house.start_batcher(lease_s=0.5)
    for run in runs:
        trainer = house.trainer(first, run)
        await house.publish(run, _of_3("g0"), group("g1"), group("g2"), group("g3"), group("g4"))
        await trainer.start("a")
        await trainer.get(2)
        damage(run, TrajectoryKey("g0", sample=1))
        damage(run, TrajectoryKey("g2", sample=0))
    await replan(runs[0])
    await _until(lambda: _planned(house, runs[0]) == 2)
    with connect(house.url) as client:
        pause_run(client, runs[1])
    await replan(runs[1])
    assert _planned(house, runs[1]) == 0
    await first.stop()

    second = await house.start_batcher()
    with connect(house.url) as client:
        resume_run(client, runs[1])
    await _until(lambda: _planned(house, runs[1]) == 2)
    for run in runs:
        trainer = house.trainer(second, run)
        await trainer.start("b")
        await trainer.stepped(await trainer.get(1))
        await house.publish(run, group("g5"), group("g6"))
        await trainer.get(3)

    assert _plans(house, runs[0]) == _plans(house, runs[1])
    assert _chain(house, runs[1]) == [1, 2, 3]
    assert _states(house, runs[0]) == _states(house, runs[1])


async def test_snapshots_and_events_lead_on_from_a_withdrawal_to_the_same_plans(
    house, damage, replan
):
    run = house.create_run(batch_groups=1)
    often = Upkeep(snapshot_events=1, snapshot_steps=1)
    first = await house.start_batcher(lease_s=0.5, upkeep=often)
    trainer = house.trainer(first, run)
    await house.publish(run, _of_3("g0"), _of_3("g1"))
    await trainer.start("a")
    await trainer.get(2)
    damage(run, TrajectoryKey("g0", sample=1))
    await replan(run)
    await trainer.start("b")
    await trainer.get(2)
    await first.stop()

    second = house.trainer(await house.start_batcher(upkeep=often), run)
    await second.start("c")
    await second.stepped(await second.get(1))
    await house.publish(run, group("g2"))
    (pulled,) = await second.get(3)

    assert pulled.mini_batch.rows.trajectory_id == ["g2/0/0", "g2/1/0"]
    assert pulled.mini_batch.rows.row_id[0] == 5
    assert _chain(house, run) == [1, 2, 3]


async def test_another_replica_serves_what_was_planned_again_and_all_that_follows(
    house, damage, replan
):
    run = house.create_run(batch_groups=1)
    planner = house.trainer(await house.start_batcher(), run)
    other = house.trainer(await house.start_batcher(), run)
    await house.publish(run, _of_3("g0"), group("g1"))
    await planner.start("a")
    await planner.get(2)
    other.session_epoch = planner.session_epoch
    await other.get(2)
    damage(run, TrajectoryKey("g0", sample=1))

    await replan(run)
    await other.start("b")
    (pulled,) = await other.get(1)
    await other.stepped([pulled])
    (second,) = await other.get(2)
    later = asyncio.create_task(other.get(3, wait_s=8))
    await house.publish(run, group("g2"))
    (third,) = await later

    assert pulled.mini_batch.rows.trajectory_id == ["g0/0/0", "g0/2/0"]
    assert second.mini_batch.rows.group_id == ["g1", "g1"]
    assert third.mini_batch.info.revision == 0


async def test_a_replica_hears_of_plans_below_those_that_were_withdrawn(house):
    run = house.create_run()
    plan = keys.run_keys(run).plan
    async with connect_async(house.url) as client:
        listener = RunListener(client, run, after_step=3)
        listener.fall_back(1)
        await client.xadd(plan, {"r": ""}, id="2-1")

        heard = [await listener.wait(with_events=False, wait_s=0.05)]
        listener.fall_back(2)
        heard.append(await listener.wait(with_events=False, wait_s=0.05))

    assert [news.is_frontier_old for news in heard] == [True, False]


async def test_a_seal_that_is_another_than_was_planned_is_set_aside(house, damage, replan):
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, _of_3("g0"), _of_3("g1"))
    await trainer.start("a")
    await trainer.get(2)
    damage(run, TrajectoryKey("g0", sample=0))
    turns = keys.trajectory_keys(run, "g1/0/0").turns
    with connect(house.url) as client:
        entries: Any = client.xrevrange(turns, count=1)
        ((entry_id, fields),) = entries
        seal = cast("SealedTrajectory", decode_event(fields[b"r"]))
        client.xdel(turns, entry_id)
        last = f"0-{int(entry_id.split(b'-')[1]) + 1}"
        client.xadd(turns, {"r": encode_event(replace(seal, payload_crcs=(7,)))}, id=last)

    done = await replan(run)

    assert done.dead == ("g0/0/0", "g1/0/0")
    assert _letters(house, run)["g1/0/0"] == "its seal is not the one that it was planned with"


async def test_whoever_goes_on_from_a_withdrawn_plan_is_refused_by_its_hash(house, damage, replan):
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, _of_3("g0"), group("g1"))
    await trainer.start("a")
    seen = (await trainer.get(1))[0].mini_batch.info.manifest_hash
    await trainer.get(2)
    await _observe(house, run, seen_step=2)
    damage(run, TrajectoryKey("g0", sample=1))

    await replan(run)
    await _until(lambda: _planned(house, run) == 2)

    with pytest.raises(StoreBehindError, match="step 1 was delivered from the manifest"):
        await trainer.get(2, observer="eyes", previous_hash=seen)
    assert await _observe(house, run, seen_step=0) == 1


async def test_a_step_that_comes_back_after_a_rollback_may_be_planned_again(house, damage, replan):
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, group("g0"), _of_3("g1"), group("g2"), group("g3"))
    await trainer.start("a")
    token = await trainer.stepped(await trainer.get(1))
    await trainer.committed(token)
    lost = await trainer.stepped(await trainer.get(2))
    await _until(lambda: _planned(house, run) == 4)
    await trainer.start("b", token=str(token))
    damage(run, TrajectoryKey("g1", sample=0))

    done = await replan(run)
    with pytest.raises(StoreBehindError):
        await trainer.start("c", token=str(lost))
    await trainer.start("d", token=str(token))
    for step in (2, 3, 4):
        await trainer.stepped(await trainer.get(step))

    assert (done.first_step, done.newest_step) == (2, 4)
    assert _chain(house, run) == [1, 2, 3, 4]
    assert _states(house, run) == {
        TrajectoryState.COMMITTED: 2,
        TrajectoryState.STEPPED: 6,
        TrajectoryState.DEAD: 1,
    }


async def test_a_run_that_had_ended_ends_again_with_what_is_left(house, damage, replan):
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, group("g0"), group("g1"), closes=True)
    await trainer.start("a")
    await trainer.get(2)
    await _until(lambda: _frontier(house, run).is_finished)
    damage(run, TrajectoryKey("g0", sample=0))

    await replan(run)
    await trainer.start("b")
    (pulled,) = await trainer.get(1)
    await trainer.stepped([pulled])

    assert pulled.mini_batch.rows.group_id == ["g1", "g1"]
    with pytest.raises(EndOfRunError):
        await trainer.get(2)


async def test_a_reward_that_was_posted_later_is_still_that_of_its_trajectory(
    house, damage, replan
):
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(), run)
    members = [
        replace(trajectory(turn("ab", "CD"), sample=s, reward=None), awaits_reward=True)
        for s in range(3)
    ]
    await house.publish(run, group("g0", *members))
    with connect(house.url) as client:
        for sample in range(3):
            post_reward(client, run, TrajectoryKey("g0", sample), reward=float(sample))
    await trainer.start("a")
    await trainer.get(1)
    damage(run, TrajectoryKey("g0", sample=0))

    await replan(run)
    await trainer.start("b")
    await trainer.get(1)

    assert [member.reward for member in _plans(house, run)[0].groups[0].trajectories] == [1.0, 2.0]


async def test_steps_of_two_configs_are_planned_again_by_the_later_one(house, damage, replan):
    run = house.create_run(batch_groups=1)
    with connect(house.url) as client:
        before = read_revisions(client, run).last.config
        revise_config(client, run, replace(before, batch_groups=2), from_step=2)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, _of_3("g0"), group("g1"), group("g2"))
    await trainer.start("a")
    await trainer.get(2)
    most = _most_live(house, run)
    damage(run, TrajectoryKey("g0", sample=0))

    await replan(run)
    await trainer.start("b")
    pulled = await trainer.get(1)

    assert [each.mini_batch.rows.group_id for each in pulled] == [["g0", "g0"], ["g1", "g1"]]
    assert pulled[0].mini_batch.info.config_revision == 2
    assert (most, _most_live(house, run)) == (1 + 2 * 1000, 2 + 2 * 1000)
    with connect(house.url) as client:
        assert read_revisions(client, run).last.from_step == 1


async def test_what_was_planned_again_is_released_and_forked_like_anything_else(
    house, damage, replan
):
    run = house.create_run(batch_groups=1, retain_checkpoints=1)
    trainer = house.trainer(await house.start_batcher(upkeep=Upkeep(snapshot_events=1)), run)
    await house.publish(run, _of_3("g0"), group("g1"))
    await trainer.start("a")
    await trainer.get(2)
    damage(run, TrajectoryKey("g0", sample=0))
    await replan(run)
    await trainer.start("b")
    for step in (1, 2):
        token = await trainer.stepped(await trainer.get(step))
        await trainer.committed(token)
        with connect(house.url) as client:
            fork_run(client, run, f"{run} at {step}", token)

    await _until(lambda: _frontier(house, run).released == 2)
    await _until(lambda: len(_plans(house, run)) == 0)

    assert _states(house, run) == {TrajectoryState.COMMITTED: 4, TrajectoryState.DEAD: 1}


async def test_whoever_looks_on_sees_what_was_planned_again(house, damage, replan):
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, _of_3("g0"), group("g1"))
    await trainer.start("a")
    await trainer.get(2)
    damage(run, TrajectoryKey("g0", sample=0))
    with connect(house.url) as client:
        history = RunHistory(client, run)
        history.refresh()
        before = [batch.num_sequences for batch in history.batches]

        await replan(run)
        await trainer.start("b")
        await trainer.get(2)
        history.refresh()

        assert before == [3, 2]
        assert [batch.num_sequences for batch in history.batches] == [2, 2]


async def test_a_rank_and_an_operator_are_told_what_is_damaged_and_what_helps(
    house, damage, replan
):
    run = house.create_run(batch_groups=1)
    planner = house.trainer(await house.start_batcher(), run)
    other = house.trainer(await house.start_batcher(), run)
    await house.publish(run, _of_3("g0"))
    await planner.start("a")
    await planner.get(1)
    damage(run, TrajectoryKey("g0", sample=1))
    other.session_epoch = planner.session_epoch

    with pytest.raises(CorruptRecordError, match=f"g0/1/0: .*`turnstream replan '{run}'`"):
        await other.get(1)
    (reason,) = _damage_reasons(house, run)
    await replan(run)

    assert reason.facts["step"] == 1
    assert "damaged payload of g0/1/0: the checksum" in reason.sentence
    assert f"`turnstream replan '{run}'`" in reason.sentence
    assert _damage_reasons(house, run) == []


def _of_3(group_id: str) -> Any:
    return group(
        group_id,
        *[trajectory(turn("ab", "CD"), sample=s, reward=float(s)) for s in range(3)],
    )


def _states(house, run: str) -> dict[TrajectoryState, int]:
    with connect(house.url) as client:
        ledger = read_ledger(client, run)
    ledger.check()
    return {state: number for state, number in ledger.by_state.items() if number}


def _letters(house, run: str) -> dict[str, str]:
    with connect(house.url) as client:
        return {each.trajectory_id: each.reason for each in read_letters(client, run).letters}


def _plans(house, run: str) -> list[Manifest]:
    """The plans, but for what names their run and the moment of an event."""
    with connect(house.url) as client:
        stored = [read_plan(client, run, step + 1) for step in range(_planned(house, run))]
    return [
        replace(each.manifest, run="", previous_hash="", last_event_id="")
        for each in stored
        if each is not None
    ]


def _chain(house, run: str) -> list[int]:
    """The steps whose plans make one chain, from the first on."""
    with connect(house.url) as client:
        stored = [read_plan(client, run, step + 1) for step in range(_planned(house, run))]
        hashes = {b"%d" % (step + 1): each.hash for step, each in enumerate(stored) if each}
        entries: Any = client.hgetall(keys.run_keys(run).batches)
    assert {step: entry.decode().partition(":")[2] for step, entry in entries.items()} == hashes
    previous = ""
    for each in stored:
        assert each is not None
        assert each.manifest.previous_hash == previous
        previous = each.hash
    return [each.manifest.step for each in stored if each is not None]


def _digest(house, run: str) -> list[Any]:
    """What of a run must not change where nothing is done; who leads, and what was asked, may."""
    names = keys.run_keys(run)
    with connect(house.url) as client:
        dumps = [
            client.dump(name)
            for name in names
            if name not in (names.leader, names.frontier, names.wake)
        ]
        frontier: Any = client.hgetall(names.frontier)
    frontier.pop(b"refused_replan", None)
    return [*dumps, frontier]


def _frontier(house, run: str) -> Frontier:
    with connect(house.url) as client:
        return read_frontier(client, run)


def _planned(house, run: str) -> int:
    return _frontier(house, run).planned


def _most_live(house, run: str) -> int:
    with connect(house.url) as client:
        return read_snapshot(client, run).most_live_groups


def _damage_reasons(house, run: str) -> list[Reason]:
    with connect(house.url) as client:
        found = reasons(read_snapshot(client, run))
    return [each for each in found if each.kind is ReasonKind.PAYLOAD_DAMAGED]


async def _observe(house, run: str, *, seen_step: int) -> int:
    """The next step of an observer, which has seen another one since."""
    async with connect_async(house.url) as client:
        declared = await declare_observer(
            client, run, observer="eyes", first_step=1, expiry_s=60.0
        )
        await note_observed(client, run, observer="eyes", step=seen_step)
    return declared.next_step


async def _until(holds: Callable[[], bool]) -> None:
    async def look() -> bool:
        return holds()

    await wait_until_async(look)


def _held(house, run: str) -> tuple[int, int, int]:
    """The sums of bytes: reserved, planned, and the rest of what is stored."""
    with connect(house.url) as client:
        held = read_budget(client, run).held
    return held.reserved, held.planned, held.stored


def _sum_held(house, run: str, state: str) -> int:
    """The bytes of every trajectory in a state, one by one."""
    names = keys.run_keys(run)
    with connect(house.url) as client:
        ledger: Any = client.hgetall(names.ledger)
        held: Any = client.hgetall(names.held)
    start = f"{state}:".encode()
    return sum(int(held.get(name, 0)) for name, entry in ledger.items() if entry.startswith(start))
