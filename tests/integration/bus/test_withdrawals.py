"""Requests to plan again, and withdrawn plans."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest

from testkit import wait_until_async
from turnstream.errors import ConflictError, NotReadyError, RunNotFoundError
from turnstream.records.events import decode_event
from turnstream.store.client import keys
from turnstream.store.client.cancellation import cancel_all
from turnstream.types import PlansWithdrawn, TrajectoryDied, TrajectoryKey, TrajectoryState
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.planner.parking import ParkedRuns
from turnstream_server.batcher.planner.planner import RunPlanner
from turnstream_server.batcher.planner.renewal import LeadershipKeeper
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.batcher.planner.snapshotting import DEFAULT_UPKEEP
from turnstream_server.bus.core.frontier import (
    Withdrawn,
)
from turnstream_server.bus.leadership.snapshots import save_snapshot
from turnstream_server.bus.planning.manifests import read_manifest, read_manifests
from turnstream_server.bus.planning.replans import (
    Withdrawal,
    await_replan,
    note_damage,
    refuse_replan,
    request_replan,
    withdraw_plans,
)


def ask(run: Any) -> str:
    """Store a request."""
    return request_replan(run.store, run.name)


def from_step(run: Any, first: int, **changes: Any) -> Withdrawal:
    """Return the withdrawal of the plans from a step on; their first trajectory is dead."""
    plans = [stored for step, stored in sorted(run.manifests.items()) if step >= first]
    members = [t.key for p in plans for g in p.manifest.groups for t in g.trajectories]
    withdrawal = Withdrawal(
        first_step=first,
        newest_step=plans[-1].manifest.step,
        manifest_hash=plans[-1].hash,
        dead=[TrajectoryDied(key=members[0], reason="checksum")],
        lease_epochs=dict.fromkeys(members[1:], 1),
        position="7-1",
        snapshot=b"what a planner knows",
    )
    return dataclasses.replace(withdrawal, **changes)


async def withdraw(run: Any, first: int, **changes: Any) -> bool:
    """Ask for a withdrawal from a step on, and do it."""
    return await withdraw_plans(run.term, ask(run), from_step(run, first, **changes))


def died(group_id: str, sample: int) -> TrajectoryDied:
    return TrajectoryDied(key=TrajectoryKey(group_id, sample), reason="checksum")


async def test_plans_are_withdrawn_from_a_step_on_and_nothing_else_is(run: Any) -> None:
    await run.plan_steps(4)
    session = await run.start("s")
    await run.commit(session, 1)
    await run.client.hset(run.keys.frontier, "session_ms", began_ms := b"7")

    assert await withdraw(run, 3)

    seen = run.read_frontier()
    assert (seen.planned, seen.stepped, seen.committed) == (2, 1, 1)
    assert (seen.session_epoch, seen.has_session) == (2, False)
    assert (seen.withdrawn, seen.replan) == (Withdrawn(revision=1, through_step=4), "")
    assert await read_manifests(run.client, run.name, first_step=1, max_count=9) == [
        run.manifests[1],
        run.manifests[2],
    ]
    assert set(await run.client.hkeys(run.keys.batches)) == {b"1", b"2"}
    times = {b"planned:1", b"planned:2", b"stepped:1", b"committed:1"}
    assert (await run.hash_of("times")).keys() == times
    assert await run.client.hget(run.keys.frontier, "session_ms") != began_ms
    ledger = await run.client.hgetall(run.keys.ledger)
    assert ledger[b"g3/0/0"] == b"dead:checksum"
    assert ledger[b"g3/1/0"] == ledger[b"g4/0/0"] == b"sealed:1"
    assert ledger[b"g2/0/0"] == b"planned:2"
    groups = await run.client.hgetall(run.keys.groups)
    assert (groups[b"g2"], groups[b"g3"], groups[b"g4"]) == (
        b"2:planned",
        b"2:decided",
        b"2:decided",
    )
    assert int(await run.client.hget(run.keys.frontier, "planned_groups")) == 2
    assert not await run.client.hexists(run.keys.frontier, "at_plans")
    run.ledger().check()
    snapshot = await run.client.hgetall(run.keys.snapshot)
    assert (snapshot[b"position"], snapshot[b"step"]) == (b"7-1", b"2")
    assert (snapshot[b"record"], snapshot[b"before"]) == (b"what a planner knows", b"0-0")
    entries = await run.client.xrange(run.keys.events)
    assert [decode_event(fields[b"r"]) for _, fields in entries[-2:]] == [
        died("g3", 0),
        PlansWithdrawn(step=3, dead=(TrajectoryKey("g3", 0),)),
    ]


async def test_bytes_of_withdrawn_plans_are_stored_or_of_dead_letters(run: Any) -> None:
    await run.plan_steps(2)
    held = {"g1/0/0": 5, "g2/0/0": 7, "g2/1/0": 11}
    await run.client.hset(run.keys.held, mapping=held)
    await run.client.hset(run.keys.budget, mapping={"stored": 1, "planned": 23})

    await withdraw(run, 2)

    budget = await run.hash_of("budget")
    assert (budget[b"stored"], budget[b"planned"]) == (b"19", b"5")
    assert (await run.hash_of("letters"))[b"g2/0/0"].endswith(b":7")
    assert (await run.hash_of("counts"))[b"dead_bytes"] == b"7"


async def test_a_snapshot_from_before_that_comes_late_brings_no_plan_back(run: Any) -> None:
    await run.plan_steps(2)
    await withdraw(run, 2, position="7-1")

    await save_snapshot(run.term, position="7-1", step=2, record=b"late")

    kept = await run.client.hgetall(run.keys.snapshot)
    assert (kept[b"step"], kept[b"record"]) == (b"1", b"what a planner knows")


async def test_withdrawal_after_the_newest_snapshot_keeps_the_events_since_the_last(
    run: Any,
) -> None:
    await run.plan_steps(2)
    await run.client.hset(run.keys.snapshot, mapping={"position": "7-1", "before": "3-1"})

    await withdraw(run, 2, position="7-1")

    assert await run.client.hget(run.keys.snapshot, "before") == b"3-1"


async def test_next_plan_has_a_number_of_its_own(run: Any) -> None:
    await run.plan_steps(2)
    await withdraw(run, 1)
    assert run.read_frontier().revision_of(2) == 1
    assert run.read_frontier().revision_of(3) == 0

    first = await run.plan("g2", step=1, previous_hash="", revision=1)
    run.manifests.pop(2)
    for group_id in ("x", "y"):
        await run.open(group_id, num_sealed=2)
        await run.plan(group_id)

    assert await read_manifest(run.client, run.name, 1) == first
    ids = [entry_id for entry_id, _ in await run.client.xrange(run.keys.plan)]
    assert ids == [b"1-1", b"2-1", b"3-0"]


async def test_withdrawing_again_changes_nothing(run: Any) -> None:
    await run.plan_steps(2)
    request, withdrawal = ask(run), from_step(run, 2)
    await withdraw_plans(run.term, request, withdrawal)
    async with run.unchanged():
        assert not await withdraw_plans(run.term, request, withdrawal)


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("other", {}, "the request other is not pending"),
        ("", {"manifest_hash": "x"}, "steps 2 to 3 have other plans"),
        ("", {"dead": [died("g1", 0)]}, "g1/0/0 is planned:1, not planned from step 2 on"),
        ("", {"dead": [died("zz", 0)]}, "zz/0/0 is unknown, not planned from step 2 on"),
    ],
)
async def test_withdrawal_of_other_plans_writes_nothing(
    run: Any, name: str, changes: Any, match: str
) -> None:
    await run.plan_steps(3)
    request = ask(run)
    async with run.refuses(ConflictError, match):
        await withdraw_plans(
            run.term,
            name or request,
            from_step(run, 2, **changes),
        )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ("group", "group g2 is filtered, not planned"),
        ("stepped", "step 1 is stepped"),
        ("planned", "steps 1 to 2 have other plans"),
    ],
)
async def test_no_plan_is_withdrawn_after_a_change_in_between(
    run: Any, change: str, match: str
) -> None:
    await run.plan_steps(2)
    session = await run.start("s")
    request, withdrawal = ask(run), from_step(run, 1)
    if change == "group":
        await run.client.hset(run.keys.groups, "g2", "2:filtered")
    elif change == "stepped":
        await run.commit(session, 1)
    else:
        await run.plan_steps(1)
    async with run.refuses(ConflictError, match):
        await withdraw_plans(run.term, request, withdrawal)


async def test_damage_of_a_current_plan_is_recorded_and_removed_with_it(run: Any) -> None:
    await run.plan_steps(2)
    await run.commit(await run.start("s"), 1)
    stepped = {"manifest_hash": run.manifests[1].hash, "sentence": "late"}
    await note_damage(run.client, run.name, step=1, **stepped)
    told = {"manifest_hash": run.manifests[2].hash, "sentence": "step 2: g2/0/0: checksum"}
    await note_damage(run.client, run.name, step=2, manifest_hash="other", sentence="no")
    assert not await run.client.hexists(run.keys.frontier, "damaged")
    await note_damage(run.client, run.name, step=2, **told)
    damaged = await run.client.hget(run.keys.frontier, "damaged")
    assert damaged.decode() == ":".join(["2", *told.values()])

    await withdraw(run, 2)
    await note_damage(run.client, run.name, step=2, **told)

    assert not await run.client.hexists(run.keys.frontier, "damaged")


async def test_request_and_answer_of_a_replan_wake_waiting_callers(run: Any) -> None:
    await run.plan_steps(2)
    seen = [await run.last_wake_up()]

    first = ask(run)
    seen.append(await run.last_wake_up())
    await refuse_replan(run.term, first, "no")
    seen.append(await run.last_wake_up())
    second = ask(run)
    seen.append(await run.last_wake_up())
    await withdraw_plans(run.term, second, from_step(run, 1))
    seen.append(await run.last_wake_up())

    assert len({str(each) for each in seen}) == len(seen)


@pytest.mark.both_servers
async def test_a_full_server_withdraws_plans(run: Any) -> None:
    await run.plan_steps(2)
    told = {"manifest_hash": run.manifests[1].hash, "sentence": "checksum"}
    async with run.full_server():
        await note_damage(run.client, run.name, step=1, **told)
        refused = ask(run)
        await refuse_replan(run.term, refused, "no")
        await withdraw_plans(run.term, ask(run), from_step(run, 1))

    assert run.read_frontier().planned == 0


async def test_a_withdrawal_may_name_more_trajectories_than_lua_can_unpack(run: Any) -> None:
    await run.plan(*await run.seal_members(4_500))

    await withdraw(run, 1)

    counts = run.ledger()
    counts.check()
    assert (counts.by_state[TrajectoryState.SEALED], counts.by_state[TrajectoryState.DEAD]) == (
        8_999,
        1,
    )


async def test_second_request_joins_the_pending_one(run: Any) -> None:
    await run.plan_steps(2)
    first = ask(run)

    assert ask(run) == first
    with pytest.raises(NotReadyError, match="no batcher has answered"):
        await_replan(run.store, run.name, first, wait_s=0)
    await refuse_replan(run.term, "other", "no")
    assert run.read_frontier().replan == first
    await refuse_replan(run.term, first, "all is well")
    with pytest.raises(ConflictError, match="all is well"):
        await_replan(run.store, run.name, first, wait_s=5)
    assert ask(run) != first


def test_replan_of_an_unknown_run_is_refused(client: Any) -> None:
    with pytest.raises(RunNotFoundError):
        request_replan(client, "nowhere")

    assert not client.exists(keys.run_keys("nowhere").frontier)


@pytest.fixture
async def view(run: Any, server: Any) -> AsyncIterator[RunView]:
    """The view of a run in a replica that does not lead it."""
    view = RunView(run.client, run.name, frontier=run.read_frontier(), on_stepped=lambda _: None)
    assembler = Assembler(server.url, max_cache_bytes=1 << 20)
    keeper = LeadershipKeeper(server.url, owner="follower", lease_s=60)
    parked = ParkedRuns(run.client)
    planner = RunPlanner(view, assembler, keeper=keeper, upkeep=DEFAULT_UPKEEP, parked=parked)
    following = asyncio.create_task(planner.run())
    yield view
    await cancel_all([following])
    await keeper.close()
    await assembler.close()


async def test_follower_receives_a_plan_with_the_number_of_a_withdrawn_one(
    run: Any, view: RunView
) -> None:
    # Groups that were decided are planned again without a word but the plan itself.
    seen: list[int] = []

    async def until_planned(step: int) -> None:
        async def is_so() -> bool:
            return view.frontier.planned == step

        await wait_until_async(is_so)
        seen.append(step)

    await run.plan_steps(3)
    await until_planned(3)
    await withdraw(run, 1)
    await until_planned(0)
    run.manifests.clear()

    await run.plan("g2", step=1, revision=1)
    await until_planned(1)

    assert seen == [3, 0, 1]
