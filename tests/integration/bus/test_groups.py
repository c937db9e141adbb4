from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis.asyncio

from turnstream.batching.fold.decisions import GroupCut, MemberDropped
from turnstream.errors import ConflictError
from turnstream.types import BatchDue, TrajectoryKey, TrajectoryState
from turnstream_server.bus.core.frontier import read_frontier_async
from turnstream_server.bus.planning.announcements import announce_due

StartRun = Callable[..., Awaitable[Any]]


async def states(run: Any) -> dict[bytes, bytes]:
    return await run.client.hgetall(run.keys.ledger)


async def test_a_dropped_group_ends_its_sealed_trajectories_with_the_reason(run: Any) -> None:
    await run.open("a", num_samples=3)
    await run.seal("a", 0)
    await run.seal("a", 1)
    await run.abandon("a", 2)

    await run.settle("a", TrajectoryState.FILTERED, 0, 1, 2)

    assert await states(run) == {
        b"a/0/0": b"filtered:why",
        b"a/1/0": b"filtered:why",
        b"a/2/0": b"abandoned:crashed",
    }
    assert await run.client.hget(run.keys.groups, "a") == b"3:filtered"
    run.ledger().check()


async def test_settling_again_changes_nothing(run: Any) -> None:
    await run.open("a")
    await run.seal("a", 0)
    await run.seal("a", 1)
    await run.settle("a", TrajectoryState.INCOMPLETE, 0, 1)
    before = await run.dump()

    await run.settle("a", TrajectoryState.INCOMPLETE, 0, 1)

    assert await run.dump() == before


async def test_surplus_leaves_the_rest_of_its_group_in_the_plan(run: Any) -> None:
    await run.open("a", num_samples=3)
    for sample in range(3):
        await run.seal("a", sample)

    await run.settle("a", TrajectoryState.SURPLUS, 2)
    await run.plan("a")
    await run.settle("a", TrajectoryState.SURPLUS, 2)

    assert await states(run) == {
        b"a/0/0": b"planned:1",
        b"a/1/0": b"planned:1",
        b"a/2/0": b"surplus:why",
    }
    assert (await read_frontier_async(run.client, run.name)).num_live_groups == 1
    run.ledger().check()


async def test_group_that_is_planned_or_unknown_cannot_be_dropped(run: Any) -> None:
    await run.plan_steps(1)
    before = await run.dump()

    for group_id, words in (("g1", "group g1 is planned"), ("x", "group x is unknown")):
        with pytest.raises(ConflictError, match=words):
            await run.settle(group_id, TrajectoryState.FILTERED)
    await run.carry_out(GroupCut(group_id="g1", reason="enough"))

    assert await run.dump() == before


@pytest.mark.parametrize("how", ["dropped", "cut"])
async def test_freed_capacity_or_bytes_of_a_group_wake_who_waits(run: Any, how: str) -> None:
    await run.open("a", num_samples=3, num_needed=2, num_begun=2)
    await run.seal("a", 0)
    before = await run.last_wake_up()

    if how == "dropped":
        await run.settle("a", TrajectoryState.INCOMPLETE, 0)
    else:
        await run.carry_out(GroupCut(group_id="a", reason="enough"))

    assert await run.last_wake_up() != before
    assert b"a/2/0" not in await run.hash_of("held")


async def test_a_dead_trajectory_is_set_aside_and_told_to_the_plan_once(run: Any) -> None:
    await run.open("a")
    await run.seal("a", 0)

    first = await run.kill("a", 0)
    before = await run.dump()
    second = await run.kill("a", 0)

    assert (first, second) == (True, False)
    assert await run.dump() == before
    assert (await states(run))[b"a/0/0"] == b"dead:checksum"
    died = (await run.events())[-1]
    assert (died.key, died.reason) == (TrajectoryKey("a", 0), "checksum")
    run.ledger().check()


@pytest.mark.parametrize("state", ["open", "planned", "unknown"])
async def test_only_a_sealed_trajectory_can_die(run: Any, state: str) -> None:
    if state != "unknown":
        await run.open("a")
    if state == "planned":
        await run.seal("a", 0)
        await run.seal("a", 1)
        await run.plan("a")

    with pytest.raises(ConflictError, match=f"a/0/0 is {state}"):
        await run.kill("a", 0)


async def test_open_members_of_a_dropped_group_are_surplus_for_late_calls(run: Any) -> None:
    await run.open("a", num_samples=3)
    await run.open("a", num_samples=3, attempt=2)
    await run.seal("a", 0)

    await run.settle("a", TrajectoryState.INCOMPLETE, 0)
    settled = await run.dump()
    answers = [*await run.seal("a", 1), *await run.seal("a", 2, attempt=2)]
    await run.abandon("a", 2)

    assert answers == [b"SURPLUS", b"SURPLUS"]
    assert settled["leases"] == []
    assert await run.dump() == settled
    assert await states(run) == {
        b"a/0/0": b"incomplete:why",
        **{f"a/{sample}/0".encode(): b"surplus:why" for sample in (1, 2)},
        **{f"a/{sample}/2".encode(): b"surplus:why" for sample in (0, 1, 2)},
    }
    assert settled["members"] == {}


async def test_a_decided_group_takes_no_more_samples_and_keeps_what_is_sealed(run: Any) -> None:
    await run.open("a", num_samples=4, num_needed=2)
    await run.seal("a", 0)
    await run.seal("a", 1)
    await run.seal("a", 2, awaits_reward=True)

    await run.carry_out(GroupCut(group_id="a", reason="enough"))
    await run.open("a", num_samples=4, num_needed=2, attempt=1)

    assert await states(run) == {
        b"a/0/0": b"sealed:1",
        b"a/1/0": b"sealed:1",
        b"a/2/0": b"surplus:enough",
        b"a/3/0": b"surplus:enough",
    }
    assert await run.client.hget(run.keys.groups, "a") == b"4:decided"
    assert (await read_frontier_async(run.client, run.name)).num_live_groups == 1


async def test_open_members_of_a_planned_group_are_surplus(run: Any) -> None:
    await run.open("a", num_samples=4)
    for sample in (0, 1):
        await run.seal("a", sample)
    await run.seal("a", 2, awaits_reward=True)

    await run.plan("a")

    reason = b"surplus:its group was planned without it"
    assert {name: state for name, state in (await states(run)).items() if name > b"a/2"} == {
        b"a/2/0": reason,
        b"a/3/0": reason,
    }
    run.ledger().check()


async def test_members_are_settled_each_with_its_own_reason(run: Any) -> None:
    await run.open("a", num_samples=3)
    await run.seal("a", 0)
    await run.seal("a", 1, awaits_reward=True)
    dropped = [
        MemberDropped(key=TrajectoryKey("a", 0), state=TrajectoryState.SURPLUS, reason="x"),
        MemberDropped(key=TrajectoryKey("a", 1), state=TrajectoryState.INCOMPLETE, reason="y"),
        MemberDropped(key=TrajectoryKey("a", 2), state=TrajectoryState.INCOMPLETE, reason="z"),
    ]

    await run.carry_out(*dropped)

    found = await states(run)
    assert (found[b"a/0/0"], found[b"a/1/0"]) == (b"surplus:x", b"incomplete:y")
    assert found[b"a/2/0"].startswith(b"open:")
    assert await run.client.hget(run.keys.groups, "a") == b"3:open"
    run.ledger().check()


async def test_the_event_of_a_choice_that_is_sent_twice_is_there_once(run: Any) -> None:
    await run.open("a")

    ids = [await announce_due(run.term, BatchDue(step=1)) for _ in range(2)]

    assert ids[0] == ids[1]
    assert await run.client.xlen(run.keys.events) == 2


async def num_open(run: Any) -> int:
    return (await read_frontier_async(run.client, run.name)).num_open_groups


async def test_open_groups_are_counted_until_they_are_decided_or_planned(run: Any) -> None:
    for group_id in ("a", "b", "c"):
        await run.open(group_id)
        await run.seal(group_id, 0)
        await run.seal(group_id, 1)
    counts = [await num_open(run)]

    await run.carry_out(GroupCut(group_id="a", reason="enough"))
    counts.append(await num_open(run))
    await run.grant("a", 0)
    counts.append(await num_open(run))
    await run.settle("a", TrajectoryState.INCOMPLETE, 0, 1)
    counts.append(await num_open(run))
    await run.plan("b")
    counts.append(await num_open(run))
    await run.carry_out(GroupCut(group_id="c", reason="enough"))
    await run.settle("c", TrajectoryState.EXPIRED, 0, 1)
    counts.append(await num_open(run))

    assert counts == [3, 2, 3, 2, 1, 0]


async def test_where_open_groups_are_bounded_a_decided_one_wakes_who_waits(
    async_client: redis.asyncio.Redis, start_run: StartRun
) -> None:
    bounded = await start_run(async_client, max_open_groups=1)
    free = await start_run(async_client)
    woken = []
    for run in (bounded, free):
        await run.open("a")
        before = await run.last_wake_up()
        await run.carry_out(GroupCut(group_id="a", reason="enough"))
        woken.append(await run.last_wake_up() != before)

    assert woken == [True, False]
