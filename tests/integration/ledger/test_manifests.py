"""Manifests, and the seals and rewards that a plan is made of."""

import re
from dataclasses import replace
from typing import Any

import pytest

from testkit import manifest, sealed
from turnstream.errors import (
    ConflictError,
    GroupTooLargeError,
    RecordError,
)
from turnstream.records.events import encode_event
from turnstream.records.manifests import encode_manifest
from turnstream.store.client import keys
from turnstream.types import (
    SealedTrajectory,
    TrajectoryDied,
    TrajectoryKey,
    TrajectoryState,
)
from turnstream_server.ledger.leadership.writes import acquire_leadership
from turnstream_server.ledger.planning import manifests, plan_writes
from turnstream_server.ledger.planning.manifests import (
    finish_marking,
    read_manifest,
    read_manifests,
)
from turnstream_server.ledger.planning.trajectories import read_seals
from turnstream_server.ledger.queries.run_snapshot import read_snapshot
from turnstream_server.ledger.release.release import read_release_state


async def open_and_seal(run: Any, *group_ids: str) -> None:
    for group_id in group_ids:
        await run.open(group_id, num_sealed=2)


@pytest.mark.parametrize(
    ("advantage", "turn_advantages", "estimator", "num_flat"),
    [
        (0.0, (0.0,), "grpo", 1),
        (0.5, (), "grpo", 0),
        (0.0, (0.5,), "grpo", 0),  # only turns differ
        (0.0, (), "gae", 0),  # the trainer estimates them
    ],
)
async def test_batch_is_flat_if_no_member_has_an_advantage(
    start_run: Any,
    advantage: float,
    turn_advantages: tuple[float, ...],
    estimator: str,
    num_flat: int,
) -> None:
    run = await start_run(estimator=estimator)
    plan = manifest("g", run=run.name)
    flat, other = (replace(each, advantage=0.0) for each in plan.groups[0].trajectories)
    other = replace(other, advantage=advantage, turn_advantages=turn_advantages)
    plan = replace(plan, groups=(replace(plan.groups[0], trajectories=(flat, other)),))
    await run.client.xadd(run.keys.plan, {"r": encode_manifest(plan)}, id="1-0")
    await run.client.hset(run.keys.frontier, "planned", 1)

    assert read_snapshot(run.store, run.name).num_flat_groups == num_flat


async def test_a_manifest_moves_its_trajectories_to_planned(run: Any) -> None:
    await open_and_seal(run, "a", "b/c", "d")

    written = await run.plan("a", "b/c")

    ledger = await run.client.hgetall(run.keys.ledger)
    assert ledger == {
        b"a/0/0": b"planned:1",
        b"a/1/0": b"planned:1",
        b"b%2Fc/0/0": b"planned:1",
        b"b%2Fc/1/0": b"planned:1",
        b"d/0/0": b"sealed:1",
        b"d/1/0": b"sealed:1",
    }
    assert await run.client.hgetall(run.keys.groups) == {
        b"a": b"2:planned",
        b"b%2Fc": b"2:planned",
        b"d": b"2:open",
    }
    assert await run.client.hgetall(run.keys.batches) == {b"1": f"4:{written.hash}".encode()}
    assert run.read_frontier().planned == 1


async def test_a_written_manifest_is_read_back_as_it_was(run: Any) -> None:
    await open_and_seal(run, "a", "b")
    first = await run.plan("a")
    second = await run.plan("b")

    assert await read_manifest(run.client, run.name, 1) == first
    assert await read_manifest(run.client, run.name, 3) is None
    assert await read_manifests(run.client, run.name, first_step=1, max_count=9) == [first, second]
    assert await read_manifests(run.client, run.name, first_step=2, max_count=9) == [second]
    assert await read_manifests(run.client, run.name, first_step=1, max_count=1) == [first]


async def test_manifest_is_written_once_as_the_next_of_its_chain(run: Any) -> None:
    await open_and_seal(run, "a", "b", "c")
    await run.plan("a", step=1)
    await run.plan("b", step=2)

    async with run.unchanged():
        await run.plan("a", step=1)
        await run.plan("b", step=2)
    for fields, words in (
        ({"step": 1}, "step 1 is planned with the manifest"),
        ({"step": 4}, "step 4 does not follow step 2"),
        ({"step": 3, "previous_hash": "0" * 64}, "step 2 has the manifest"),
    ):
        async with run.refuses(ConflictError, words):
            await run.plan("c", **fields)


@pytest.mark.parametrize("state", ["open", "filtered", "planned", "unknown"])
async def test_a_manifest_is_refused_whole_when_one_trajectory_is_not_sealed(
    run: Any, state: str
) -> None:
    await open_and_seal(run, "a")
    if state != "unknown":
        await run.open("b", num_sealed=1)
    if state in {"filtered", "planned"}:
        await run.seal("b", 1)
    if state == "filtered":
        await run.settle("b", TrajectoryState.FILTERED, 0, 1)
    if state == "planned":
        await run.plan("b")
    async with run.refuses(ConflictError, f"b/[01]/0 is {state}.*, not sealed"):
        await run.plan("a", "b")


async def test_a_manifest_that_names_a_trajectory_twice_is_refused(run: Any) -> None:
    await open_and_seal(run, "a")

    with pytest.raises(ConflictError, match="a/0/0 is named twice"):
        await run.plan("a", "a")


async def test_plan_of_an_abandoned_lineage_must_be_repeated(run: Any) -> None:
    await run.plan_steps(2)
    session = await run.start("s")
    await run.commit(session, 2)
    await run.start("back", run.token(1))
    await open_and_seal(run, "a")
    async with run.unchanged():
        assert await run.try_to_plan("a", lineage="main") is None

    await run.plan("a", lineage="main-1")


async def seal_members(run: Any, num_groups: int) -> list[str]:
    """Write groups of two sealed members to the ledger; return their names."""
    groups = [f"g{number}" for number in range(num_groups)]
    ids = [f"{group}/{sample}/0" for group in groups for sample in (0, 1)]
    pipeline = run.client.pipeline(transaction=False)
    pipeline.hset(run.keys.ledger, mapping=dict.fromkeys(ids, "sealed:1"))
    pipeline.hset(run.keys.groups, mapping=dict.fromkeys(groups, "2:open"))
    pipeline.hset(run.keys.counts, mapping={"sealed": len(ids), "accepted": len(ids)})
    await pipeline.execute()
    return groups


async def test_a_batch_may_name_more_trajectories_than_lua_can_unpack(run: Any) -> None:
    # unpack() of 9,000 values fails with "too many results to unpack".
    groups = await seal_members(run, 4_500)

    await run.plan(*groups)

    counts = run.ledger()
    counts.check()
    assert counts.by_state[TrajectoryState.PLANNED] == 9_000
    assert set(await run.client.hvals(run.keys.ledger)) == {b"planned:1"}


async def test_next_leader_marks_the_groups_that_a_dead_one_left(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def die(*_: Any) -> None:
        return None

    await open_and_seal(run, "a", "b", "c")
    monkeypatch.setattr(plan_writes, "SLICE", 1)  # each group is a slice of its own
    with monkeypatch.context() as dying:
        dying.setattr(manifests, "_mark", die)
        await run.plan("a", "b", "c")
    counts = run.ledger()
    assert [counts.by_state[each] for each in (TrajectoryState.SEALED, PLANNED)] == [4, 2]

    await finish_marking(run.term)

    counts = run.ledger()
    counts.check()
    assert counts.by_state[PLANNED] == 6
    assert set(await run.client.hvals(run.keys.groups)) == {b"2:planned"}
    async with run.unchanged():
        await finish_marking(run.term)
        await run.plan("a", "b", "c", step=1)


async def test_planning_and_settling_continue_on_a_full_server(run: Any) -> None:
    await open_and_seal(run, "a", "b", "c")
    async with run.full_server():
        with pytest.raises(GroupTooLargeError):
            await run.open("d")

        await acquire_leadership(run.client, run.name, owner="p", lease_s=60)
        await run.plan("a")
        await run.settle("b", TrajectoryState.FILTERED, 0, 1)
        await run.kill("c", 0)
        session = await run.start("s")
        await run.step(session, 1)
        assert (await read_release_state(run.client, run.name)).num_entries == 6

    counts = run.ledger()
    counts.check()
    assert counts.by_state[TrajectoryState.STEPPED] == 2


PLANNED = TrajectoryState.PLANNED
KEY = TrajectoryKey("g", sample=0)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (None, "record"),
        (b"\x00" * 16, "record"),
        (encode_event(TrajectoryDied(key=KEY, reason="checksum")), "another record.*checksum"),
        (encode_event(sealed("g", sample=1)), "another record.*sample=1"),
    ],
)
async def test_other_entries_in_place_of_a_seal_are_reported(
    run: Any, record: bytes | None, why: str
) -> None:
    whole = sealed("h")
    for name, stored in (("g/0/0", record), ("h/0/0", encode_event(whole))):
        if stored is not None:
            await run.client.xadd(keys.trajectory_keys(run.name, name).turns, {"r": stored})

    found = await read_seals(run.client, run.name, [KEY, whole.key])

    assert isinstance(found[whole.key], SealedTrajectory)
    refusal = found[KEY]
    assert isinstance(refusal, RecordError)
    assert re.search(why, str(refusal))


async def test_seals_of_more_than_one_reply_are_each_of_their_own_trajectory(run: Any) -> None:
    wanted = [TrajectoryKey("g", sample) for sample in range(300)]
    for key in wanted:
        turns = keys.trajectory_keys(run.name, key.trajectory_id).turns
        await run.client.xadd(turns, {"r": encode_event(sealed("g", sample=key.sample))})

    found = await read_seals(run.client, run.name, wanted)

    assert {key: getattr(seal, "key", None) for key, seal in found.items()} == {
        key: key for key in wanted
    }
