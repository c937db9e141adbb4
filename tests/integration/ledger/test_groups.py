from typing import Any

import pytest

from turnstream.batching.fold.decisions import GroupCut, MemberDropped
from turnstream.errors import ConflictError, StoreUnavailableError
from turnstream.types import BatchDue, TrajectoryKey, TrajectoryState
from turnstream_server.ledger.leadership.writes import Difference
from turnstream_server.ledger.planning import groups
from turnstream_server.ledger.planning.announcements import announce_due


async def test_a_dropped_group_ends_its_sealed_trajectories_with_the_reason(run: Any) -> None:
    await run.open("a", num_samples=3, num_sealed=2)
    await run.abandon("a", 2)

    await run.settle("a", TrajectoryState.FILTERED, 0, 1, 2)

    assert await run.hash_of("ledger") == {
        b"a/0/0": b"filtered:why",
        b"a/1/0": b"filtered:why",
        b"a/2/0": b"abandoned:crashed",
    }
    assert await run.client.hget(run.keys.groups, "a") == b"3:filtered"
    run.ledger().check()
    async with run.unchanged():
        await run.settle("a", TrajectoryState.FILTERED, 0, 1, 2)


async def test_surplus_leaves_the_rest_of_its_group_in_the_plan(run: Any) -> None:
    await run.open("a", num_samples=3, num_sealed=3)

    await run.settle("a", TrajectoryState.SURPLUS, 2)
    await run.plan("a")
    await run.settle("a", TrajectoryState.SURPLUS, 2)

    assert await run.hash_of("ledger") == {
        b"a/0/0": b"planned:1",
        b"a/1/0": b"planned:1",
        b"a/2/0": b"surplus:why",
    }
    assert run.read_frontier().num_live_groups == 1
    run.ledger().check()


@pytest.mark.parametrize("how", ["dropped", "cut"])
async def test_freed_capacity_or_bytes_of_a_group_wake_who_waits(run: Any, how: str) -> None:
    await run.open("a", num_samples=3, num_needed=2, num_opened=2, num_sealed=1)
    before = await run.last_wake_up()

    if how == "dropped":
        await run.settle("a", TrajectoryState.INCOMPLETE, 0)
    else:
        await run.carry_out(GroupCut(group_id="a", reason="enough"))

    assert await run.last_wake_up() != before
    assert b"a/2/0" not in await run.hash_of("payload_bytes")


async def test_a_dead_trajectory_is_set_aside_and_told_to_the_plan_once(run: Any) -> None:
    await run.open("a", num_sealed=1)

    first = await run.kill("a", 0)
    before = run.dump()
    second = await run.kill("a", 0)

    assert (first, second) == (True, False)
    assert run.dump() == before
    assert (await run.hash_of("ledger"))[b"a/0/0"] == b"dead:checksum"
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
    await run.open("a", num_samples=3, num_sealed=1)
    for attempt in (1, 2):
        await run.open("a", num_samples=3, attempt=attempt)

    await run.settle("a", TrajectoryState.INCOMPLETE, 0)
    settled = run.dump()
    answers = [*await run.seal("a", 1), *await run.seal("a", 2, attempt=2)]
    await run.abandon("a", 2)

    assert answers == [b"SURPLUS", b"SURPLUS"]
    assert settled["leases"] is None
    assert run.dump() == settled
    assert await run.hash_of("ledger") == {
        b"a/0/0": b"incomplete:why",
        **{f"a/{sample}/0".encode(): b"surplus:why" for sample in (1, 2)},
        **{f"a/{sample}/{n}".encode(): b"surplus:why" for sample in (0, 1, 2) for n in (1, 2)},
    }
    assert settled["members"] is None


async def test_attempt_after_one_that_the_store_lost_is_surplus_too(run: Any) -> None:
    for attempt in range(3):
        await run.open("a", attempt=attempt)
    await run.client.hdel(run.keys.ledger, "a/1/1")
    await run.client.zrem(run.keys.leases, "a/1/1")

    await run.settle("a", TrajectoryState.INCOMPLETE)

    assert await run.client.hget(run.keys.ledger, "a/1/2") == b"surplus:why"
    assert not await run.client.exists(run.keys.leases)


async def test_a_decided_group_takes_no_more_samples_and_keeps_what_is_sealed(run: Any) -> None:
    await run.open("a", num_samples=4, num_needed=2, num_sealed=2)
    await run.seal("a", 2, awaits_reward=True)

    await run.carry_out(GroupCut(group_id="a", reason="enough"))
    await run.open("a", num_samples=4, num_needed=2, attempt=1)

    assert await run.hash_of("ledger") == {
        b"a/0/0": b"sealed:1",
        b"a/1/0": b"sealed:1",
        b"a/2/0": b"surplus:enough",
        b"a/3/0": b"surplus:enough",
    }
    assert await run.client.hget(run.keys.groups, "a") == b"4:decided"
    assert run.read_frontier().num_live_groups == 1


async def test_open_members_of_a_planned_group_are_surplus(run: Any) -> None:
    await run.open("a", num_samples=4, num_sealed=2)
    await run.seal("a", 2, awaits_reward=True)

    await run.plan("a")

    reason = b"surplus:its group was planned without it"
    assert {
        name: state for name, state in (await run.hash_of("ledger")).items() if name > b"a/2"
    } == {
        b"a/2/0": reason,
        b"a/3/0": reason,
    }
    run.ledger().check()


@pytest.mark.both_servers
async def test_members_are_settled_each_with_its_own_reason(run: Any) -> None:
    await run.open("a", num_samples=3, num_sealed=1)
    await run.seal("a", 1, awaits_reward=True)
    dropped = [
        MemberDropped(key=TrajectoryKey("a", 0), state=TrajectoryState.SURPLUS, reason="x"),
        MemberDropped(key=TrajectoryKey("a", 1), state=TrajectoryState.INCOMPLETE, reason="y"),
        MemberDropped(key=TrajectoryKey("a", 2), state=TrajectoryState.INCOMPLETE, reason="z"),
    ]

    await run.carry_out(*dropped)

    found = await run.hash_of("ledger")
    assert (found[b"a/0/0"], found[b"a/1/0"]) == (b"surplus:x", b"incomplete:y")
    assert found[b"a/2/0"].startswith(b"open:")
    assert await run.client.hget(run.keys.groups, "a") == b"3:open"
    run.ledger().check()


@pytest.mark.both_servers
async def test_the_event_of_a_choice_that_is_sent_twice_is_there_once(run: Any) -> None:
    await run.open("a")

    ids = [await announce_due(run.term, BatchDue(step=1)) for _ in range(2)]

    assert ids[0] == ids[1]
    assert await run.client.xlen(run.keys.events) == 2


async def test_where_open_groups_are_bounded_a_decided_one_wakes_who_waits(start_run: Any) -> None:
    bounded = await start_run(max_open_groups=1)
    free = await start_run()
    woken = []
    for run in (bounded, free):
        await run.open("a")
        before = await run.last_wake_up()
        await run.carry_out(GroupCut(group_id="a", reason="enough"))
        woken.append(await run.last_wake_up() != before)

    assert woken == [True, False]


async def test_group_whose_facts_change_each_time_ends_with_an_error(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def differ(_: Any, changes: list[Any]) -> list[Difference]:
        return [Difference("groups", "a", None) for _ in changes]

    monkeypatch.setattr(groups, "write_all", differ)
    await run.open("a", num_sealed=1)

    with pytest.raises(StoreUnavailableError, match="group a changed in each of 100 tries"):
        await run.carry_out(GroupCut(group_id="a", reason="ready"))
