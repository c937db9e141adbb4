"""A revision comes into force by one event of the leader, and no plan is written past it."""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from turnstream.errors import ConflictError, RejectedError
from turnstream.store.client.scripts import run_command_async
from turnstream.store.run.configs import read_revisions, revise_config
from turnstream.store.run.groups import adopt_command, heartbeat_command, list_lapsed_async
from turnstream.store.waits.wait_reasons import reasons
from turnstream.types import ConfigRevised, Purpose
from turnstream_server.ledger.planning.announcements import announce_revision, read_revisions_async
from turnstream_server.ledger.queries.run_snapshot import read_snapshot

StartRun = Callable[..., Awaitable[Any]]


def revise(run: Any, *, from_step: int, **changes: Any) -> int:
    """Store the last config with other fields."""
    config = dataclasses.replace(read_revisions(run.store, run.name).last.config, **changes)
    return revise_config(run.store, run.name, config, from_step=from_step)


async def announce(run: Any, revision: int, *, step: int) -> bool:
    revised = ConfigRevised(revision=revision, step=step)
    return await announce_revision(run.term, revised)


async def test_revision_comes_into_force_once_with_an_event(run: Any) -> None:
    await run.plan_steps(2)
    revise(run, from_step=3, max_staleness=7)
    revise(run, from_step=6, max_staleness=8)

    first = await announce(run, 2, step=3)
    before = run.dump()
    again = await announce(run, 2, step=3)

    assert (first, again) == (True, False)
    assert run.dump() == before
    assert (await run.events())[-1] == ConfigRevised(revision=2, step=3)
    assert (await read_revisions_async(run.client, run.name)).in_force == 2
    assert run.read_frontier().next_revision == 6


async def test_revision_is_not_in_force_before_the_previous_step_is_planned(run: Any) -> None:
    await run.plan_steps(1)
    revise(run, from_step=3, max_staleness=7)

    with pytest.raises(ConflictError, match="revision 2 is not due after step 1"):
        await announce(run, 2, step=3)

    assert (await read_revisions_async(run.client, run.name)).in_force == 1


async def test_plan_of_a_step_with_another_config_must_be_repeated(run: Any) -> None:
    await run.plan_steps(1)
    await run.open("late", num_sealed=2)
    revise(run, from_step=2, max_staleness=7)
    async with run.unchanged():
        assert await run.try_to_plan("late", config_revision=1) is None

    await announce(run, 2, step=2)
    await run.plan("late", config_revision=2)


@pytest.mark.parametrize("revision", [1, 3])
async def test_plan_with_a_config_not_in_force_is_refused(run: Any, revision: int) -> None:
    await run.plan_steps(1)
    await run.open("late", num_sealed=2)
    revise(run, from_step=2, max_staleness=7)
    await announce(run, 2, step=2)
    async with run.unchanged():
        words = f"planned with config revision {revision}, and revision 2 is in force"
        with pytest.raises(ConflictError, match=words):
            await run.plan("late", config_revision=revision)


@pytest.mark.parametrize(
    ("before", "sizes", "after"), [(1, (1, 1), 4), (3, (3, 3), 1), (3, (3, 1), 2)]
)
async def test_the_steps_before_count_with_the_groups_that_they_had(
    start_run: StartRun, before: int, sizes: tuple[int, ...], after: int
) -> None:
    # Two batches are trained, the second may be short. Later steps have other numbers of groups.
    # One of them may be live in addition to the next.
    run = await start_run(batch_groups=before, max_staleness=1)
    most = sum(sizes) + 2 * after
    session = await run.start("s")
    for step, size in enumerate(sizes, 1):
        groups = [f"g{step}/{i}" for i in range(size)]
        for group_id in groups:
            await run.open(group_id, num_sealed=2)
        await run.plan(*groups)
        await run.step(session, step)
    revise(run, from_step=3, batch_groups=after, mini_batch_groups=after)
    await announce(run, 2, step=3)

    for number in range(2 * after):
        await run.open(f"new{number}")
    with pytest.raises(RejectedError, match=f"{most} groups are live, {most} are allowed"):
        await run.open("one too many")

    found = reasons(read_snapshot(run.store, run.name))
    assert [each.facts["most"] for each in found if each.kind == "out_of_capacity"] == [most]


async def test_groups_that_are_open_get_the_deadline_that_the_run_had_not(run: Any) -> None:
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


async def open_and_shorten(run: Any, *lengths_s: float) -> None:
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
        await run_command_async(run.client, adopt_command(run.name, "early/0/0", writer="another"))
    lease_ms, *told = await run_command_async(
        run.client, heartbeat_command(run.name, [("early/1/0", 1)], writer="writer")
    )
    assert told == [b"OK"]
    return lease_ms


async def test_leases_that_become_shorter_stay_until_every_living_writer_was_told(run: Any) -> None:
    # A writer that renewed at a third of the old lease lost its writes before the next heartbeat.
    await open_and_shorten(run, 30.0, 1.0)

    lease_ms = await ask_for_all_leases(run)

    assert lease_ms == 1000
    ends = await lease_ends(run)
    assert ends.keys() == {"early/0/0", "early/1/0", "later/0/0", "later/1/0"}
    assert all(590 < end <= 600 for end in ends.values())


@pytest.mark.parametrize("moved_ms", [-700_000, 700_000])
async def test_leases_are_short_after_the_revision_despite_a_clock_reset(
    run: Any, moved_ms: int
) -> None:
    await open_and_shorten(run, 50.0)
    floor_ms, _, most_ms = (await run.client.hget(run.keys.config, "lease_floor")).partition(b":")
    moved = f"{int(floor_ms) + moved_ms}:{int(most_ms)}"
    await run.client.hset(run.keys.config, "lease_floor", moved)

    await ask_for_all_leases(run)

    assert all(40 < end <= 50 for end in (await lease_ends(run)).values())
