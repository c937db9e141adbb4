"""A revision comes into force by one event of the leader, and no plan is written past it."""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis.asyncio

from turnstream.errors import ConflictError, RejectedError
from turnstream.store.client.connection import connect
from turnstream.store.client.scripts import run_command_async
from turnstream.store.run.configs import read_revisions, revise_config
from turnstream.store.run.leases import heartbeat_command, list_lapsed_async, take_over_command
from turnstream.store.waits.wait_reasons import reasons
from turnstream.types import ConfigRevised, Purpose
from turnstream_server.bus.core.frontier import read_frontier_async
from turnstream_server.bus.planning.announcements import announce_revision, read_revisions_async
from turnstream_server.bus.queries.run_snapshot import read_snapshot
from turnstream_server.embedded import EmbeddedServer

StartRun = Callable[..., Awaitable[Any]]


@pytest.fixture
def revise(server: EmbeddedServer) -> Callable[..., int]:
    """`revise(run, from_step=..., ...)` stores the last config with other fields."""

    def store(run: Any, *, from_step: int, **changes: Any) -> int:
        with connect(server.url) as client:
            changed = dataclasses.replace(read_revisions(client, run.name).last.config, **changes)
            return revise_config(client, run.name, changed, from_step=from_step)

    return store


async def announce(run: Any, revision: int, *, step: int) -> bool:
    revised = ConfigRevised(revision=revision, step=step)
    return await announce_revision(run.term, revised)


async def test_revision_comes_into_force_once_with_an_event(run: Any, revise: Any) -> None:
    await run.plan_steps(2)
    revise(run, from_step=3, max_staleness=7)

    first = await announce(run, 2, step=3)
    before = await run.dump()
    again = await announce(run, 2, step=3)

    assert (first, again) == (True, False)
    assert await run.dump() == before
    assert (await run.events())[-1] == ConfigRevised(revision=2, step=3)
    assert (await read_revisions_async(run.client, run.name)).in_force == 2
    assert (await read_frontier_async(run.client, run.name)).next_revision == 0


async def test_revision_is_not_in_force_before_the_previous_step_is_planned(
    run: Any, revise: Any
) -> None:
    await run.plan_steps(1)
    revise(run, from_step=3, max_staleness=7)

    with pytest.raises(ConflictError, match="revision 2 is not due after step 1"):
        await announce(run, 2, step=3)

    assert (await read_revisions_async(run.client, run.name)).in_force == 1


async def test_next_of_several_revisions_is_returned_with_the_first(run: Any, revise: Any) -> None:
    revise(run, from_step=1, max_staleness=7)
    revise(run, from_step=4, max_staleness=8)

    await announce(run, 2, step=1)

    assert (await read_frontier_async(run.client, run.name)).next_revision == 4


async def test_plan_of_a_step_with_another_config_must_be_repeated(run: Any, revise: Any) -> None:
    await run.plan_steps(1)
    await run.open("late")
    for sample in range(2):
        await run.seal("late", sample)
    revise(run, from_step=2, max_staleness=7)
    before = await run.dump()

    assert await run.try_to_plan("late", config_revision=1) is None
    refused = await run.dump()
    await announce(run, 2, step=2)
    await run.plan("late", config_revision=2)

    assert refused == before


@pytest.mark.parametrize("revision", [1, 3])
async def test_plan_with_a_config_not_in_force_is_refused(
    run: Any, revise: Any, revision: int
) -> None:
    await run.plan_steps(1)
    await run.open("late")
    for sample in range(2):
        await run.seal("late", sample)
    revise(run, from_step=2, max_staleness=7)
    await announce(run, 2, step=2)
    before = await run.dump()

    words = f"planned with config revision {revision}, and revision 2 is in force"
    with pytest.raises(ConflictError, match=words):
        await run.plan("late", config_revision=revision)

    assert await run.dump() == before


@pytest.mark.parametrize(
    ("before", "sizes", "after"), [(1, (1, 1), 4), (3, (3, 3), 1), (3, (3, 1), 2)]
)
async def test_the_steps_before_count_with_the_groups_that_they_had(
    async_client: redis.asyncio.Redis,
    start_run: StartRun,
    revise: Any,
    server: EmbeddedServer,
    before: int,
    sizes: tuple[int, ...],
    after: int,
) -> None:
    # Two batches are trained, the last of them may be short; from step 3 on they have other numbers
    # of groups. Of these, one step may be live beyond the next.
    run = await start_run(async_client, batch_groups=before, max_staleness=1)
    most = sum(sizes) + 2 * after
    session = await run.start("s")
    for step, size in enumerate(sizes, 1):
        groups = [f"g{step}/{i}" for i in range(size)]
        for group_id in groups:
            await run.open(group_id)
            await run.seal(group_id, 0)
            await run.seal(group_id, 1)
        await run.plan(*groups)
        await run.step(session, step)
    revise(run, from_step=3, batch_groups=after, mini_batch_groups=after)
    await announce(run, 2, step=3)

    for number in range(2 * after):
        await run.open(f"new{number}")
    with pytest.raises(RejectedError, match=f"{most} groups are live, {most} are allowed"):
        await run.open("one too many")

    with connect(server.url) as client:
        found = reasons(read_snapshot(client, run.name))
    assert [each.facts["most"] for each in found if each.kind == "out_of_capacity"] == [most]


async def test_groups_that_are_open_get_the_deadline_that_the_run_had_not(
    run: Any, revise: Any
) -> None:
    await run.open("open")
    await run.open("eval", purpose=Purpose.EVAL)
    await run.plan_steps(1)
    revise(run, from_step=2, group_deadline_s=100)

    await announce(run, 2, step=2)

    due_ms = await run.run_ms() + 100_000
    assert await run.client.zrange(run.keys.deadlines, 0, -1, withscores=True) == [
        (b"group:eval", due_ms),
        (b"group:open", due_ms),
    ]


async def lease_ends(run: Any) -> dict[str, float]:
    """Seconds until each lease ends."""
    seconds, microseconds = await run.client.time()
    found = await run.client.zrange(run.keys.leases, 0, -1, withscores=True)
    return {name.decode(): end / 1000 - seconds - microseconds / 1e6 for name, end in found}


async def open_and_shorten(run: Any, revise: Any, *lengths_s: float) -> None:
    """Open a group under leases of ten minutes, which become as short as this, one by one."""
    for revision, lease_s in enumerate((600.0, *lengths_s), 2):
        revise(run, from_step=1, lease_s=lease_s)
        await announce(run, revision, step=1)
        if lease_s == 600.0:
            await run.open("early")


async def ask_for_all_leases(run: Any) -> int:
    """Everything that begins or looks at a lease; gives how long one is, in ms."""
    assert await list_lapsed_async(run.client, run.name) == []
    await run.open("later")
    with pytest.raises(ConflictError):
        await run_command_async(
            run.client, take_over_command(run.name, "early/0/0", writer="another")
        )
    lease_ms, *told = await run_command_async(
        run.client, heartbeat_command(run.name, [("early/1/0", 1)])
    )
    assert told == [b"OK"]
    return lease_ms


async def test_leases_that_become_shorter_stay_until_every_living_writer_was_told(
    run: Any, revise: Any
) -> None:
    # Whoever renewed every third of the lease before lost what it wrote before its next heartbeat.
    await open_and_shorten(run, revise, 30.0, 1.0)

    lease_ms = await ask_for_all_leases(run)

    assert lease_ms == 1000
    ends = await lease_ends(run)
    assert ends.keys() == {"early/0/0", "early/1/0", "later/0/0", "later/1/0"}
    assert all(590 < end <= 600 for end in ends.values())


@pytest.mark.parametrize("moved_ms", [-700_000, 700_000])
async def test_leases_are_short_after_the_revision_despite_a_clock_reset(
    run: Any, revise: Any, moved_ms: int
) -> None:
    await open_and_shorten(run, revise, 50.0)
    floor_ms, _, most_ms = (await run.client.hget(run.keys.config, "lease_floor")).partition(b":")
    moved = f"{int(floor_ms) + moved_ms}:{int(most_ms)}"
    await run.client.hset(run.keys.config, "lease_floor", moved)

    await ask_for_all_leases(run)

    assert all(40 < end <= 50 for end in (await lease_ends(run)).values())
