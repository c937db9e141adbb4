from __future__ import annotations

import hashlib
from typing import Any

import pytest

from turnstream.batching.decisions import GroupCut
from turnstream.errors import ConflictError, FencedError, ReleasedError
from turnstream.records.compact import (
    CompactEnds,
    compact_batch,
    decode_batch,
    encode_batch,
    encode_ends,
)
from turnstream.store import keys
from turnstream.store.scripts import Script, run_command_async
from turnstream.testing import wait_until_async
from turnstream.types import RecoveryToken, TrajectoryKey, TrajectoryState
from turnstream_server.bus.frontier import read_frontier_async
from turnstream_server.bus.ledger import read_ledger_async
from turnstream_server.bus.observers import declare_observer, note_observed
from turnstream_server.bus.release import (
    find_ended,
    finish_batch,
    fold_batch,
    fold_ended,
    groups_that_are_over,
    raise_floor,
    release_payload,
)
from turnstream_server.bus.snapshots import save_snapshot, trim_events

pytestmark = pytest.mark.redis


async def hash_of(run: Any, name: str) -> dict[bytes, bytes]:
    return await run.client.hgetall(getattr(run.keys, name))


async def append(run: Any, trajectory_id: str, record: bytes, *, lease: str) -> int:
    where = keys.trajectory_keys(run.name, trajectory_id)
    return await run_command_async(run.client, Script("append")(where, lease, 0, 0, record))


async def floor_of(run: Any, **arguments: Any) -> int:
    return await raise_floor(
        run.client, run.name, **{"leader_epoch": run.leader_epoch, **arguments}
    )


async def fold(run: Any, step: int) -> None:
    """Everything that a leader does with a released step."""
    stored = run.manifests[step]
    epoch = run.leader_epoch
    record = encode_batch(compact_batch(stored.manifest, manifest_hash=stored.hash))
    await save_snapshot(
        run.client, run.name, position="0-0", step=step, record=b"", leader_epoch=epoch
    )
    await fold_batch(run.client, run.name, stored.manifest, leader_epoch=epoch)
    await finish_batch(run.client, run.name, step=step, record=record, leader_epoch=epoch)


async def fold_ends(run: Any, *ids: str, number: int = 1, epoch: int | None = None) -> bool:
    ended = CompactEnds(
        trajectories=tuple(map(keys.parse_trajectory_id, ids)), ends=("x",) * len(ids)
    )
    return await fold_ended(
        run.client,
        run.name,
        ids,
        number=number,
        record=encode_ends(ended),
        leader_epoch=run.leader_epoch if epoch is None else epoch,
    )


@pytest.fixture
async def released(run: Any) -> Any:
    """A run of four steps, committed at 1, 2 and 3, of which step 1 and 2 are released."""
    await run.plan_steps(4)
    session = await run.start("s")
    await run.commit(session, 1, 2, 3)
    assert await floor_of(run) == 2
    return run


# the floor


@pytest.mark.parametrize(
    ("commits", "floor"), [((), 0), ((3,), 0), ((2, 3), 2), ((1, 2, 3), 2), ((1, 4), 1)]
)
async def test_what_the_oldest_kept_checkpoint_cannot_ask_for_is_given_up(
    run: Any, commits: tuple[int, ...], floor: int
) -> None:
    await run.plan_steps(4)
    session = await run.start("s")
    if commits:
        await run.commit(session, *commits)

    assert await floor_of(run) == floor
    assert await floor_of(run) == floor
    assert (await read_frontier_async(run.client, run.name)).released == floor


async def test_the_floor_waits_for_whoever_holds_it(run: Any) -> None:
    await run.plan_steps(4)
    await run.commit(await run.start("s"), 2, 3, 4)

    assert [await floor_of(run, at_most=most) for most in (0, 1, 9)] == [0, 1, 3]


async def test_a_live_observer_keeps_what_it_has_not_seen_until_it_expires(run: Any) -> None:
    where = (run.client, run.name)
    await run.plan_steps(4)
    await declare_observer(*where, observer="eval", first_step=1, expiry_s=60)
    await declare_observer(*where, observer="gone", first_step=1, expiry_s=0.001)
    await run.commit(await run.start("s"), 2, 3, 4)

    async def is_free() -> bool:
        await note_observed(*where, observer="eval", step=2)
        return await floor_of(run) == 2

    assert await floor_of(run) == 0
    await wait_until_async(is_free, describe="the end of the silent observer")
    await note_observed(*where, observer="eval", step=4)
    assert await floor_of(run) == 3


async def test_an_observer_cannot_begin_with_what_is_released(released: Any) -> None:
    where = (released.client, released.name)

    with pytest.raises(ReleasedError, match="step 2 is no longer retained: the oldest batch kept"):
        await declare_observer(*where, observer="late", first_step=2, expiry_s=60)

    assert await declare_observer(*where, observer="late", first_step=3, expiry_s=60) == 3


async def test_the_floor_never_falls(released: Any) -> None:
    assert await floor_of(released, at_most=0) == 2


async def test_only_the_leader_raises_the_floor(run: Any) -> None:
    await run.plan_steps(2)
    await run.commit(await run.start("s"), 1, 2)

    with pytest.raises(FencedError):
        await floor_of(run, leader_epoch=run.leader_epoch - 1)

    assert (await read_frontier_async(run.client, run.name)).released == 0


async def test_a_token_below_the_floor_is_refused_by_name(released: Any) -> None:
    before = await released.dump()

    with pytest.raises(ReleasedError, match=r"names step 1, but the steps up to 2 are"):
        await released.start("later", released.token(1))

    assert await released.dump() == before


async def test_the_start_of_the_run_is_refused_once_anything_is_released(released: Any) -> None:
    with pytest.raises(ReleasedError, match="names step 0"):
        await released.start("later", RecoveryToken(lineage="main", step=0, chain_hash=""))


async def test_a_token_at_the_floor_is_taken_up_also_when_the_steps_before_are_folded(
    released: Any,
) -> None:
    for step in (1, 2):
        await fold(released, step)

    session = await released.start("later", released.token(2))

    assert session.next_step == 3


async def test_a_checkpoint_that_was_rolled_back_no_longer_counts(released: Any) -> None:
    session = await released.start("later", released.token(2))
    assert await floor_of(released) == 2

    await released.commit(session, 4)

    assert await floor_of(released) == 2  # of the checkpoints 2 and 4; 3 is no more


# payload


async def test_released_payload_leaves_a_tombstone_that_refuses_late_writers(run: Any) -> None:
    await append(run, "g/0/0", b"turn one", lease="1:w")

    await release_payload(run.client, run.name, ["g/0/0"])
    await release_payload(run.client, run.name, ["g/0/0"])

    names = keys.trajectory_keys(run.name, "g/0/0")
    assert await run.client.exists(names.turns) == 0
    assert await run.client.hgetall(names.meta) == {b"released": b"1"}
    assert 0 < await run.client.pttl(names.meta) <= 900_000
    for lease in ("1", "1:w", "2:other"):
        with pytest.raises(FencedError, match="released"):
            await append(run, "g/0/0", b"turn two", lease=lease)


@pytest.mark.parametrize(("lease_s", "longest_ms"), [(1.0, 900_000), (600.0, 9_000_000)])
async def test_a_tombstone_outlives_the_leases_of_its_run(
    run: Any, lease_s: float, longest_ms: int
) -> None:
    await release_payload(run.client, run.name, ["g/0/0"], lease_s=lease_s)

    left_ms = await run.client.pttl(keys.trajectory_keys(run.name, "g/0/0").meta)

    assert longest_ms - 60_000 < left_ms <= longest_ms


async def test_a_tombstone_also_stands_where_nothing_was_ever_written(run: Any) -> None:
    await release_payload(run.client, run.name, ["g/0/0"])

    with pytest.raises(FencedError, match="released"):
        await append(run, "g/0/0", b"turn one", lease="1:w")


async def test_after_the_tombstone_the_ledger_refuses_the_seal(released: Any) -> None:
    await fold(released, 1)

    (reply,) = await released.seal("g1", 0)

    assert reply.startswith(b"FENCED g1/0/0 was never opened, or is over")


# batches


async def test_a_folded_batch_leaves_its_names_and_a_fingerprint_of_each_group(
    released: Any,
) -> None:
    await fold(released, 1)

    ledger, groups, past = [await hash_of(released, name) for name in ("ledger", "groups", "past")]
    assert not any(name.startswith(b"g1") for name in (*ledger, *groups))
    batch = decode_batch(past[b"1"])
    assert (batch.manifest_hash, batch.step) == (released.manifests[1].hash, 1)
    assert batch.trajectories == (TrajectoryKey("g1", 0), TrajectoryKey("g1", 1))
    assert await hash_of(released, "over") == {b"n": b"1", b"0": hashlib.sha1(b"g1").digest()[:8]}
    assert await released.client.xlen(released.keys.plan) == 3
    (await read_ledger_async(released.client, released.name)).check()


async def test_folding_again_changes_nothing(released: Any) -> None:
    await fold(released, 1)
    before = await released.dump()

    await fold(released, 1)

    assert await released.dump() == before


async def test_the_states_add_up_after_every_act_of_the_release(released: Any) -> None:
    async def check() -> None:
        counts = await read_ledger_async(released.client, released.name)
        counts.check()
        assert counts.by_state[TrajectoryState.COMMITTED] == 6

    for step in (1, 2):
        plan = released.manifests[step].manifest
        await fold_batch(released.client, released.name, plan, leader_epoch=released.leader_epoch)
        await check()
        await fold(released, step)
        await check()


async def test_a_batch_that_is_not_released_cannot_be_folded(released: Any) -> None:
    before = await released.dump()
    plan = released.manifests[3].manifest

    with pytest.raises(ConflictError, match="step 3 is not released; step 2 is"):
        await fold_batch(released.client, released.name, plan, leader_epoch=released.leader_epoch)

    assert await released.dump() == before


@pytest.mark.parametrize(
    ("step", "snapshot_step", "why"),
    [
        (2, 9, "step 2 is not next"),
        (1, 0, "step 1 is not in the snapshot"),
    ],
)
async def test_a_plan_that_is_still_needed_cannot_be_replaced(
    released: Any, step: int, snapshot_step: int, why: str
) -> None:
    epoch = released.leader_epoch
    where = (released.client, released.name)
    await save_snapshot(*where, position="0-0", step=snapshot_step, record=b"", leader_epoch=epoch)
    before = await released.dump()

    with pytest.raises(ConflictError, match=why):
        await finish_batch(*where, step=step, record=b"", leader_epoch=epoch)

    assert await released.dump() == before


async def test_a_released_step_beyond_the_floor_cannot_be_replaced(released: Any) -> None:
    for step in (1, 2):
        await fold(released, step)

    with pytest.raises(ConflictError, match="step 3 is not next: step 2 is folded, step 2 is rel"):
        await fold_after_snapshot(released, 3)


async def fold_after_snapshot(run: Any, step: int) -> None:
    where = (run.client, run.name)
    epoch = run.leader_epoch
    await save_snapshot(*where, position="0-0", step=step, record=b"", leader_epoch=epoch)
    await finish_batch(*where, step=step, record=b"", leader_epoch=epoch)


async def test_a_planner_goes_on_after_the_last_batch_when_all_before_are_folded(
    released: Any,
) -> None:
    for step in (1, 2):
        await fold(released, step)

    await released.plan_steps(1)

    assert (await read_frontier_async(released.client, released.name)).planned == 5
    (await read_ledger_async(released.client, released.name)).check()


@pytest.mark.parametrize("act", ["fold_batch", "finish", "ends", "snapshot", "trim"])
async def test_a_planner_whose_term_is_over_releases_nothing(released: Any, act: str) -> None:
    before = await released.dump()
    where, old = (released.client, released.name), {"leader_epoch": released.leader_epoch - 1}
    acts = {
        "fold_batch": lambda: fold_batch(*where, released.manifests[1].manifest, **old),
        "finish": lambda: finish_batch(*where, step=1, record=b"", **old),
        "ends": lambda: fold_ends(released, "g1/0/0", epoch=old["leader_epoch"]),
        "snapshot": lambda: save_snapshot(*where, position="9-0", step=9, record=b"", **old),
        "trim": lambda: trim_events(*where, **old),
    }

    with pytest.raises(FencedError):
        await acts[act]()

    assert await released.dump() == before


# a name is used once


async def test_a_group_that_is_over_cannot_be_opened_again(released: Any) -> None:
    await fold(released, 1)
    before = await released.dump()

    with pytest.raises(ConflictError, match="group g1 was over"):
        await released.open("g1")

    assert await released.dump() == before


@pytest.mark.timeout(120)
async def test_no_name_of_ten_thousand_is_forgotten_and_no_other_refused(run: Any) -> None:
    # Enough for the buckets to split many times over, on both sides of a power of two.
    names = [f"visit {number}" for number in range(10_000)]
    await run.plan_steps(3)
    await run.commit(await run.start("s"), 1, 2, 3)
    await floor_of(run)
    where = (run.keys.leader, run.keys.frontier, run.keys.ledger, run.keys.groups, run.keys.over)
    for start in range(0, len(names), 250):
        some = [keys.encode_name(name) for name in names[start : start + 250]]
        await run.client.hset(run.keys.groups, mapping=dict.fromkeys(some, "1:planned"))
        command = Script("fold_batch", "turnstream_server.bus")(
            where, run.leader_epoch, 1, len(some), *some
        )
        await run_command_async(run.client, command)

    refused = 0
    for name in names[::7]:
        with pytest.raises(ConflictError, match="was over"):
            await run.open(name)
        refused += 1
    for number in range(100):
        await run.open(f"visit {10_000 + number}")

    over = await hash_of(run, "over")
    packed = b"".join(value for bucket, value in over.items() if bucket != b"n")
    fingerprints = {packed[start : start + 8] for start in range(0, len(packed), 8)}
    expected = {hashlib.sha1(keys.encode_name(name).encode()).digest()[:8] for name in names}
    assert (over[b"n"], fingerprints) == (b"10000", expected)
    assert len(packed) == 80_000
    assert max(len(value) for value in over.values()) < 8 * 64 * 3
    assert refused == len(names[::7])


# what ended untrained


async def ended_group(run: Any, group_id: str, state: TrajectoryState) -> None:
    await run.open(group_id)
    await run.seal(group_id, 0)
    await run.seal(group_id, 1)
    await run.settle(group_id, state, 0, 1)


async def test_what_ended_untrained_is_found_with_its_reason_and_the_dead_is_not(run: Any) -> None:
    await ended_group(run, "a", TrajectoryState.FILTERED)
    await run.open("b", num_samples=4)
    await run.abandon("b", 0)
    await run.seal("b", 1)
    await run.seal("b", 2)
    await run.kill("b", 2)

    cursor, found = await find_ended(run.client, run.name, cursor="0", num_entries=500)

    assert cursor == "0"
    assert found == {
        "a/0/0": "filtered:why",
        "a/1/0": "filtered:why",
        "b/0/0": "abandoned:crashed",
    }


async def test_folded_ends_leave_counts_of_their_reasons_and_fingerprints(run: Any) -> None:
    await ended_group(run, "a", TrajectoryState.FILTERED)
    await ended_group(run, "b", TrajectoryState.INCOMPLETE)

    done = await fold_ends(run, "a/0/0", "a/1/0", "b/0/0")

    assert done
    assert await hash_of(run, "reasons") == {b"filtered:why": b"2", b"incomplete:why": b"1"}
    assert await hash_of(run, "ledger") == {b"b/1/0": b"incomplete:why"}
    assert await hash_of(run, "groups") == {}
    assert (await hash_of(run, "over"))[b"n"] == b"2"
    (await read_ledger_async(run.client, run.name)).check()
    with pytest.raises(ConflictError, match="was over"):
        await run.open("a")


async def test_folding_ends_again_changes_nothing(run: Any) -> None:
    await ended_group(run, "a", TrajectoryState.FILTERED)
    await fold_ends(run, "a/0/0", "a/1/0")
    before = await run.dump()

    assert not await fold_ends(run, "a/0/0", "a/1/0")

    assert await run.dump() == before


async def test_an_end_in_a_group_that_may_still_change_stays_in_the_ledger(run: Any) -> None:
    # Its entry is what keeps the same attempt from being opened once more.
    await run.open("a")
    await run.abandon("a", 0)
    before = await run.dump()

    assert await groups_that_are_over(run.client, run.name, ["a"]) == set()
    with pytest.raises(ConflictError, match="group a of a/0/0 is open"):
        await fold_ends(run, "a/0/0")

    assert await run.dump() == before


@pytest.mark.parametrize(("what", "state"), [("a/0/0", "sealed:1"), ("x/0/0", "unknown")])
async def test_only_what_has_ended_can_be_folded(run: Any, what: str, state: str) -> None:
    await ended_group(run, "b", TrajectoryState.FILTERED)
    await run.open("a")
    await run.seal("a", 0)
    before = await run.dump()

    with pytest.raises(ConflictError, match=f"{what} is {state}, not at its end"):
        await fold_ends(run, "b/0/0", what)

    assert await run.dump() == before


async def test_records_of_ends_are_numbered_without_a_gap(run: Any) -> None:
    await ended_group(run, "a", TrajectoryState.FILTERED)

    with pytest.raises(ConflictError, match="record 2 does not follow 0"):
        await fold_ends(run, "a/0/0", number=2)


async def test_the_seal_of_a_member_that_is_open_after_its_group_is_gone_is_surplus(
    run: Any,
) -> None:
    await run.open("a")
    await run.seal("a", 0)
    await run.settle("a", TrajectoryState.INCOMPLETE, 0)
    await fold_ends(run, "a/0/0")

    assert await run.seal("a", 1) == [b"SURPLUS"]

    (await read_ledger_async(run.client, run.name)).check()


async def test_surplus_of_a_group_that_is_gone_can_still_be_settled(released: Any) -> None:
    await released.open("late", num_samples=3)
    for sample in range(3):
        await released.seal("late", sample)
    await released.plan("late")
    await released.client.hdel(released.keys.groups, "late")

    await released.settle("late", TrajectoryState.SURPLUS, 2)

    assert (await hash_of(released, "ledger"))[b"late/2/0"] == b"surplus:why"


async def test_what_is_folded_leaves_no_reward_member_deadline_refill_or_lease(
    async_client: Any, start_run: Any
) -> None:
    run = await start_run(
        async_client,
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
    assert await floor_of(run) == 1

    await fold_ends(run, *(f"a/{sample}/0" for sample in (2, 3, 4)))
    assert await hash_of(run, "rewards") != {}
    await fold(run, 1)

    left = ("ledger", "groups", "rewards", "members", "deadlines", "refills", "leases")
    assert {
        name: await run.client.exists(getattr(run.keys, name)) for name in left
    } == dict.fromkeys(left, 0)
    (await read_ledger_async(run.client, run.name)).check()


async def test_nothing_is_told_of_a_group_that_is_gone(run: Any) -> None:
    await ended_group(run, "a", TrajectoryState.FILTERED)
    await fold_ends(run, "a/0/0", "a/1/0")
    before = await run.dump()

    await run.carry_out(GroupCut(group_id="a", reason="enough"))
    with pytest.raises(ConflictError, match="group a is unknown, or over"):
        await run.settle("a", TrajectoryState.FILTERED, 0, 1)
    with pytest.raises(ConflictError, match="group a is unknown, or over"):
        await run.grant("a", 0)
    with pytest.raises(ConflictError, match="a/0/0 was never opened, or is over"):
        await run.post_reward("a", 0, 1.0)

    assert await run.dump() == before


async def test_a_group_that_is_gone_is_not_planned(run: Any) -> None:
    await run.open("a")
    await run.seal("a", 0)
    await run.seal("a", 1)
    await run.client.hdel(run.keys.groups, "a")
    before = await run.dump()

    with pytest.raises(ConflictError, match="group a of a/0/0 is over"):
        await run.plan("a")

    assert await run.dump() == before


# events


async def test_events_go_up_to_the_snapshot_before_and_not_beyond(run: Any) -> None:
    for number in range(150):
        await run.open(f"g{number}")
    entries = await run.client.xrange(run.keys.events)
    position = entries[120][0].decode()
    where, epoch = (run.client, run.name), run.leader_epoch

    for each in (position, position, entries[140][0].decode()):
        assert await trim_events(*where, leader_epoch=epoch) == 0
        await save_snapshot(*where, position=each, step=0, record=b"", leader_epoch=epoch)
    while await trim_events(*where, leader_epoch=epoch):
        pass

    kept = await run.client.xrange(run.keys.events)
    assert kept == entries[len(entries) - len(kept) :]
    assert 30 <= len(kept) < 150
