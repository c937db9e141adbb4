"""Remains of trajectories that ended untrained: names, and counts of their reasons."""

from typing import Any

import pytest

from turnstream.batching.fold.decisions import GroupCut
from turnstream.errors import ConflictError
from turnstream.records.compact import decode_ends
from turnstream.types import TrajectoryKey, TrajectoryState
from turnstream_server.ledger.release.release import find_ended, finished_groups
from turnstream_server.ledger.release.release_writes import DROPPED


async def ended_group(run: Any, group_id: str, state: TrajectoryState) -> None:
    await run.open(group_id, num_sealed=2)
    await run.settle(group_id, state, 0, 1)


@pytest.mark.both_servers
@pytest.mark.parametrize("end", [*DROPPED, "dead:discarded"])
async def test_an_end_of_every_kind_is_found(run: Any, end: str) -> None:
    entries = {"a/0/0": f"{end}:why", "a/1/0": "sealed:1", "b/0/0": "dead:checksum"}
    await run.client.hset(run.keys.ledger, mapping=entries)

    assert await find_ended(run.client, run.name) == {"a/0/0": f"{end}:why"}


async def test_groups_that_can_get_no_member_are_finished(run: Any) -> None:
    states = ("planned", "filtered", "expired", "incomplete", "surplus", "evaluated")
    names = [f"g{number}" for number in range(300)]  # more than one call takes
    entries = {name: f"1:{states[number % 6]}" for number, name in enumerate(names)}
    await run.client.hset(run.keys.groups, mapping={**entries, "g0": "1:open", "g299": "1:open"})

    assert await finished_groups(run.client, run.name, names) == {*names[1:-1]}
    assert await finished_groups(run.client, run.name, []) == set()


def num_finished(over: dict[bytes, bytes]) -> int:
    """The number of groups in the key `over`."""
    return len(b"".join(over.values())) // 8


async def test_compact_ends_leave_counts_of_their_reasons_and_fingerprints(run: Any) -> None:
    await ended_group(run, "a", TrajectoryState.FILTERED)
    await ended_group(run, "b", TrajectoryState.INCOMPLETE)

    done = await run.fold_ends("a/0/0", "a/1/0", "b/0/0")

    assert done
    assert await run.hash_of("reasons") == {b"filtered:why": b"2", b"incomplete:why": b"1"}
    assert await run.hash_of("ledger") == {b"b/1/0": b"incomplete:why"}
    assert await run.hash_of("groups") == {}
    assert num_finished(await run.hash_of("finished_groups")) == 2
    (record,) = (await run.hash_of("untrained")).values()
    members = ("a", 0), ("a", 1), ("b", 0)
    assert [*decode_ends(record)] == [TrajectoryKey(*each) for each in members]
    run.ledger().check()
    with pytest.raises(ConflictError, match="is finished"):
        await run.open("a")


async def test_seal_of_a_member_of_a_finished_group_is_surplus(run: Any) -> None:
    await run.open("a", num_sealed=1)
    await run.settle("a", TrajectoryState.INCOMPLETE, 0)
    await run.fold_ends("a/0/0")

    assert await run.seal("a", 1) == [b"SURPLUS"]

    run.ledger().check()


async def test_surplus_of_a_group_that_is_gone_can_still_be_settled(released: Any) -> None:
    await released.open("late", num_samples=3, num_sealed=3)
    await released.plan("late")
    await released.client.hdel(released.keys.groups, "late")

    await released.settle("late", TrajectoryState.SURPLUS, 2)

    assert (await released.hash_of("ledger"))[b"late/2/0"] == b"surplus:why"


@pytest.mark.both_servers
async def test_folding_removes_members_deadlines_refills_and_leases(start_run: Any) -> None:
    run = await start_run(
        group_deadline_s=3600,
        reward_deadline_s=1800,
        deadline_policy="refill",
        max_refills=2,
        retain_checkpoints=1,
    )
    await run.open("a", num_samples=5, num_needed=2)
    await run.seal("a", 0, awaits_reward=True)
    await run.post_reward("a", 0, 1.0)
    await run.seal("a", 1)
    await run.seal("a", 2, awaits_reward=True)
    await run.grant("a", 3)
    await run.plan("a")
    assert await run.post_reward("a", 2, 1.0) == "LATE"
    await run.commit(await run.start("s"), 1)
    assert await run.advance_watermark() == 1

    await run.fold_ends(*(f"a/{sample}/0" for sample in (2, 3, 4)))
    await run.compact(1)

    left = ("ledger", "groups", "members", "deadlines", "refills", "leases")
    assert {
        name: await run.client.exists(getattr(run.keys, name)) for name in left
    } == dict.fromkeys(left, 0)
    run.ledger().check()


async def test_no_event_is_written_for_a_finished_group(run: Any) -> None:
    await ended_group(run, "a", TrajectoryState.FILTERED)
    await run.fold_ends("a/0/0", "a/1/0")
    async with run.unchanged():
        await run.carry_out(GroupCut(group_id="a", reason="enough"))
        with pytest.raises(ConflictError, match="group a is unknown, or finished"):
            await run.settle("a", TrajectoryState.FILTERED, 0, 1)
        with pytest.raises(ConflictError, match="group a is unknown, or finished"):
            await run.grant("a", 0)


async def test_a_group_that_is_gone_is_not_planned(run: Any) -> None:
    await run.open("a", num_sealed=2)
    await run.client.hdel(run.keys.groups, "a")
    async with run.refuses(ConflictError, "group a of a/0/0 is finished"):
        await run.plan("a")
