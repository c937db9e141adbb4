from __future__ import annotations

from typing import Any

import pytest

from turnstream.batching.fold.decisions import GroupCut
from turnstream.errors import (
    ConflictError,
    FencedError,
    GroupTooLargeError,
)
from turnstream.types import TrajectoryState
from turnstream_server.bus.core.frontier import read_frontier_async
from turnstream_server.bus.leadership.leadership import acquire_leadership, release_leadership
from turnstream_server.bus.planning.manifests import read_manifest, read_manifests

pytestmark = pytest.mark.redis


async def open_and_seal(run: Any, *group_ids: str) -> None:
    for group_id in group_ids:
        await run.open(group_id)
        for sample in range(2):
            await run.seal(group_id, sample)


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
    assert (await read_frontier_async(run.client, run.name)).planned == 1


async def test_a_written_manifest_is_read_back_as_it_was(run: Any) -> None:
    await open_and_seal(run, "a", "b")
    first = await run.plan("a")
    second = await run.plan("b")

    assert await read_manifest(run.client, run.name, 1) == first
    assert await read_manifest(run.client, run.name, 3) is None
    assert await read_manifests(run.client, run.name, first_step=1, max_count=9) == [first, second]
    assert await read_manifests(run.client, run.name, first_step=2, max_count=9) == [second]
    assert await read_manifests(run.client, run.name, first_step=1, max_count=1) == [first]


async def test_writing_the_same_manifest_again_changes_nothing(run: Any) -> None:
    await open_and_seal(run, "a", "b")
    await run.plan("a", step=1)
    await run.plan("b", step=2)
    before = await run.dump()

    await run.plan("a", step=1)
    await run.plan("b", step=2)

    assert await run.dump() == before


async def test_another_manifest_for_a_planned_step_is_a_conflict(run: Any) -> None:
    await open_and_seal(run, "a", "b")
    await run.plan("a", step=1)
    before = await run.dump()

    with pytest.raises(ConflictError, match="step 1 is planned with the manifest"):
        await run.plan("b", step=1)

    assert await run.dump() == before


async def test_a_step_cannot_be_left_out(run: Any) -> None:
    await open_and_seal(run, "a")

    with pytest.raises(ConflictError, match="step 2 does not follow step 0"):
        await run.plan("a", step=2)


async def test_a_manifest_must_continue_the_chain(run: Any) -> None:
    await open_and_seal(run, "a", "b")
    await run.plan("a")

    with pytest.raises(ConflictError, match="step 1 has the manifest"):
        await run.plan("b", previous_hash="0" * 64)

    assert await read_manifest(run.client, run.name, 2) is None


@pytest.mark.parametrize("state", ["open", "filtered", "planned", "unknown"])
async def test_a_manifest_is_refused_whole_when_one_trajectory_is_not_sealed(
    run: Any, state: str
) -> None:
    await open_and_seal(run, "a")
    if state != "unknown":
        await run.open("b")
        await run.seal("b", 0)
    if state in {"filtered", "planned"}:
        await run.seal("b", 1)
    if state == "filtered":
        await run.settle("b", TrajectoryState.FILTERED, 0, 1)
    if state == "planned":
        await run.plan("b")
    before = await run.dump()

    with pytest.raises(ConflictError, match=f"b/[01]/0 is {state}.*, not sealed"):
        await run.plan("a", "b")

    assert await run.dump() == before


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
    before = await run.dump()

    assert await run.try_to_plan("a", lineage="main") is None
    refused = await run.dump()
    await run.plan("a", lineage="main-1")

    assert refused == before


async def test_a_group_that_was_decided_before_is_no_longer_counted_as_open(run: Any) -> None:
    await open_and_seal(run, "a", "b")
    await run.carry_out(GroupCut(group_id="a", reason="enough"))

    await run.plan("a")

    assert await run.client.hget(run.keys.frontier, "open_groups") == b"1"


async def test_old_plan_of_a_fenced_planner_is_refused_even_if_equal(run: Any) -> None:
    await open_and_seal(run, "a")
    await run.plan("a", step=1)
    await release_leadership(run.term_of(1), owner="p")
    await acquire_leadership(run.client, run.name, owner="q", lease_s=60)

    with pytest.raises(FencedError):
        await run.plan("a", step=1)


async def test_a_batch_may_name_more_trajectories_than_lua_can_unpack(run: Any) -> None:
    # unpack() of 9,000 values fails with "too many results to unpack".
    groups = [f"g{number}" for number in range(4_500)]
    pipeline = run.client.pipeline(transaction=False)
    pipeline.hset(
        run.keys.ledger,
        mapping={f"{group}/{sample}/0": "sealed:1" for group in groups for sample in (0, 1)},
    )
    pipeline.hset(run.keys.groups, mapping=dict.fromkeys(groups, "2:open"))
    pipeline.hset(run.keys.counts, mapping={"sealed": 9_000, "accepted": 9_000})
    await pipeline.execute()

    await run.plan(*groups)

    counts = run.ledger()
    counts.check()
    assert counts.by_state[TrajectoryState.PLANNED] == 9_000
    assert set(await run.client.hvals(run.keys.ledger)) == {b"planned:1"}


async def test_planning_and_settling_continue_on_a_full_server(run: Any) -> None:
    await open_and_seal(run, "a", "b", "c")
    await run.client.config_set("maxmemory", 1)
    try:
        with pytest.raises(GroupTooLargeError):
            await run.open("d")

        await acquire_leadership(run.client, run.name, owner="p", lease_s=60)
        await run.plan("a")
        await run.settle("b", TrajectoryState.FILTERED, 0, 1)
        await run.kill("c", 0)
        session = await run.start("s")
        await run.step(session, 1)
    finally:
        await run.client.config_set("maxmemory", 0)

    counts = run.ledger()
    counts.check()
    assert counts.by_state[TrajectoryState.STEPPED] == 2
