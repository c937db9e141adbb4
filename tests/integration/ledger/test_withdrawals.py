"""Requests to plan again, and withdrawn plans."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from testkit import wait_until_async
from turnstream.errors import ConflictError, NotReadyError, RunNotFoundError
from turnstream.records.events import decode_event
from turnstream.store.client import keys
from turnstream.store.client.cancellation import cancel_all
from turnstream.types import PlansWithdrawn, TrajectoryDied, TrajectoryKey
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.planner.listener import ParkedRuns
from turnstream_server.batcher.planner.planner import RunPlanner
from turnstream_server.batcher.planner.renewal import LeadershipKeeper
from turnstream_server.batcher.planner.replanning import (
    Withdrawal,
    read_withdrawal,
    withdraw,
)
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.batcher.planner.snapshotting import DEFAULT_UPKEEP
from turnstream_server.ledger.core.frontier import Withdrawn
from turnstream_server.ledger.leadership.leader_fields import save_snapshot
from turnstream_server.ledger.leadership.writes import Difference, write, write_decision
from turnstream_server.ledger.planning.announcements import answered, await_replan, request_replan
from turnstream_server.ledger.planning.manifests import read_manifest, read_manifests
from turnstream_server.ledger.sessions.sessions import note_damage


def ask(run: Any) -> str:
    """Store a request."""
    return request_replan(run.store, run.name)


def from_step(run: Any, first: int, request: str, *, position: str = "7-1") -> Withdrawal:
    """Return the withdrawal of the plans from a step on; their first trajectory is dead."""
    plans = [stored.manifest for step, stored in sorted(run.manifests.items()) if step >= first]
    dead, *others = [t.key for plan in plans for g in plan.groups for t in g.trajectories]
    epochs = dict.fromkeys(others, 1)
    return Withdrawal(request, plans, {dead: "checksum"}, epochs, position, b"a planner's state")


async def carry_out(run: Any, asked: Withdrawal) -> bool:
    """Withdraw plans as a leader does; return whether this call did it."""
    written = await write_decision(
        run.term,
        lambda: read_withdrawal(run.term, asked),
        lambda facts: withdraw(facts, asked),
    )
    return written is not None


async def withdraw_plans(run: Any, first: int, **changes: Any) -> None:
    """Ask for a withdrawal from a step on, and do it."""
    assert await carry_out(run, from_step(run, first, ask(run), **changes))


async def refuse(run: Any, request: str) -> bool:
    """Refuse a request; return whether it was pending."""
    found = await write(run.term, answered(request, refused="all is well"))
    return not isinstance(found, Difference)


async def test_plans_are_withdrawn_from_a_step_on_and_nothing_else_is(run: Any) -> None:
    await run.plan_steps(4)
    session = await run.start("s")
    await run.commit(session, 1)
    await run.client.hset(run.keys.frontier, "session_ms", began_ms := b"7")
    held = {"g3/0/0": 7, "g3/1/0": 11, "g4/0/0": 13, "g4/1/0": 17}
    await run.client.hset(run.keys.payload_bytes, mapping=held)
    before = await run.hash_of("budget")

    await withdraw_plans(run, 3)

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
    states = [groups[name] for name in (b"g2", b"g3", b"g4")]
    assert states == [b"2:planned", b"2:decided", b"2:decided"]
    assert int(await run.client.hget(run.keys.frontier, "planned_groups")) == 2
    assert not await run.client.hexists(run.keys.frontier, "at_plans")
    run.ledger().check()
    budget = await run.hash_of("budget")
    moved = int(budget[b"stored"]) - int(before.get(b"stored", 0))
    assert moved == int(before[b"planned"]) - int(budget[b"planned"]) == 7 + 11 + 13 + 17
    assert (await run.hash_of("dead_letters"))[b"g3/0/0"].endswith(b":7")
    assert (await run.hash_of("counts"))[b"dead_bytes"] == b"7"
    snapshot = await run.client.hgetall(run.keys.snapshot)
    assert (snapshot[b"position"], snapshot[b"step"]) == (b"7-1", b"2")
    assert snapshot[b"record"] == b"a planner's state"
    entries = await run.client.xrange(run.keys.events)
    key = TrajectoryKey("g3", 0)
    assert [decode_event(fields[b"r"]) for _, fields in entries[-2:]] == [
        TrajectoryDied(key=key, reason="checksum"),
        PlansWithdrawn(step=3, dead=(key,)),
    ]
    assert await_replan(run.store, run.name, await newest_request(run), wait_s=0) == (
        "steps 3 to 4; damaged trajectories: 1"
    )


async def newest_request(run: Any) -> str:
    """Return the name of the request that was answered last."""
    answer = await run.client.hget(run.keys.frontier, "replanned")
    return answer.decode().partition(":")[0]


@pytest.mark.parametrize(("known", "before"), [("7-1", b"3-1"), ("6-1", b"6-1")])
async def test_snapshot_of_a_withdrawal_stays_and_keeps_the_events_since_the_last(
    run: Any, known: str, before: bytes
) -> None:
    await run.plan_steps(2)
    await run.client.hset(run.keys.snapshot, mapping={"position": known, "before": "3-1"})
    await withdraw_plans(run, 2, position="7-1")

    await save_snapshot(run.term, position="7-1", step=2, record=b"late")

    kept = await run.client.hgetall(run.keys.snapshot)
    assert (kept[b"step"], kept[b"record"]) == (b"1", b"a planner's state")
    assert kept[b"before"] == before


@pytest.mark.both_servers
async def test_next_plan_has_a_number_of_its_own_and_a_lower_id(run: Any) -> None:
    await run.plan_steps(2)
    async with run.full_server():
        await withdraw_plans(run, 1)
    assert run.read_frontier().revision_of(2) == 1
    assert run.read_frontier().revision_of(3) == 0

    first = await run.plan("g2", step=1, previous_hash="", revision=1)
    run.manifests.pop(2)
    for group_id in ("x", "y"):
        await run.open(group_id, num_sealed=2)
        await run.plan(group_id)
    again = await run.client.xrange(run.keys.plan)
    await withdraw_plans(run, 2)

    assert await read_manifest(run.client, run.name, 1) == first
    assert [entry_id for entry_id, _ in again] == [b"1-1", b"2-1", b"3-0"]
    assert await run.client.xrange(run.keys.plan) == again[:1]
    assert run.read_frontier().revision_of(3) == 2


async def test_plans_that_changed_are_not_withdrawn(run: Any) -> None:
    await run.plan_steps(3)
    request = ask(run)
    asked = from_step(run, 2, request)
    async with run.unchanged():
        assert not await carry_out(run, asked._replace(request="other"))
    names = run.keys
    for key, field, value, match in (
        (names.groups, "g2", "2:filtered", "group 'g2', or a trajectory of it, is not planned"),
        (names.ledger, "g3/1/0", "sealed:1", "group 'g3', or a trajectory"),
        (names.frontier, "stepped", "2", "step 2 is stepped"),
    ):
        before = await run.client.hget(key, field)
        await run.client.hset(key, field, value)
        async with run.refuses(ConflictError, match):
            await carry_out(run, asked)
        await run.client.hset(key, field, before)
    facts = await read_withdrawal(run.term, asked)
    changes = withdraw(facts, asked)
    assert changes is not None
    await run.commit(await run.start("s"), 1)
    async with run.unchanged():  # the trainer has stepped in between
        assert isinstance(await write(run.term, changes), Difference)

    assert await carry_out(run, asked)
    async with run.unchanged():
        assert not await carry_out(run, asked)


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

    await withdraw_plans(run, 2)
    await note_damage(run.client, run.name, step=2, **told)

    assert not await run.client.hexists(run.keys.frontier, "damaged")


async def test_request_and_answer_of_a_replan_wake_waiting_callers(run: Any) -> None:
    await run.plan_steps(2)
    seen = [await run.last_wake_up()]

    first = ask(run)
    seen.append(await run.last_wake_up())
    assert ask(run) == first
    assert await run.last_wake_up() == seen[-1]
    with pytest.raises(NotReadyError, match="no batcher has answered"):
        await_replan(run.store, run.name, first, wait_s=0)
    assert not await refuse(run, "other")
    assert await refuse(run, first)
    seen.append(await run.last_wake_up())
    with pytest.raises(ConflictError, match="all is well"):
        await_replan(run.store, run.name, first, wait_s=0)
    earlier = '{"first_step": 1, "newest_step": 2}'  # by an earlier release
    await run.client.hset(run.keys.frontier, "replanned", f"{first}:{earlier}")
    assert await_replan(run.store, run.name, first, wait_s=0) == earlier
    assert ask(run) != first
    seen.append(await run.last_wake_up())
    await withdraw_plans(run, 1)
    seen.append(await run.last_wake_up())

    assert len({str(each) for each in seen}) == len(seen)


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
    await withdraw_plans(run, 1)
    await until_planned(0)
    run.manifests.clear()

    await run.plan("g2", step=1, revision=1)
    await until_planned(1)

    assert seen == [3, 0, 1]
