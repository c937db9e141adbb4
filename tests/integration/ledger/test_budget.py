"""Bytes of a run: the reasons for waiting, and their release."""

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import redis

from turnstream.batching.fold.decisions import GroupEvaluated
from turnstream.errors import RejectedError, WaitKind
from turnstream.store.client.scripts import run_command_async
from turnstream.store.run.groups import reserve_command
from turnstream.store.waits.wait_reasons import reasons
from turnstream.types import Purpose, TrajectoryKey, TrajectoryState
from turnstream_server.ledger.queries.ledger import read_budget
from turnstream_server.ledger.queries.run_snapshot import read_snapshot
from turnstream_server.ledger.sessions.observers import declare_observer, note_observed

OVERHEAD = 4096


@pytest.mark.parametrize(
    ("max_bytes", "size", "batch_groups", "commit_every"),
    [
        (3 * OVERHEAD, 10, 1, 3),
        (3 * OVERHEAD, 150_000, 2, 2),
        (150_000, 10, 3, 1),
        (150_000, 150_000, 1, 1),
        (2_000_000, 10, 2, 2),
        (2_000_000, 150_000, 3, 1),
    ],
)
async def test_run_continues_with_any_budget(
    start_run: Any, max_bytes: int, size: int, batch_groups: int, commit_every: int
) -> None:
    run = await start_run(batch_groups=batch_groups, max_bytes=max_bytes, retain_checkpoints=1)
    session = await run.start("s")
    names = (f"g{number}" for number in itertools.count())
    ready: list[str] = []
    planned: list[list[str]] = []
    most_held = 0
    for step in range(1, 7):
        while len(ready) < batch_groups:
            admitted = await open_admitted(run, itertools.islice(names, 4 * batch_groups))
            assert admitted, "no group is admitted"
            most_held = max(most_held, run.held().held)
            for group_id in admitted:
                await grow_and_seal(run, group_id, size)
            dropped, passed = admitted[1::2], admitted[::2]
            for group_id in dropped:
                await run.settle(group_id, TrajectoryState.FILTERED, 0, 1)
            await run.release(*members(dropped))
            ready += passed
        planned.append([ready.pop(0) for _ in range(batch_groups)])
        await run.plan(*planned[-1])
        token = await run.step(session, step)
        if step % commit_every == 0:
            await run.commit_token(session, token)
            for groups in planned[: await run.advance_watermark()]:
                await run.release(*members(groups))

    # Only kept steps and the groups of the awaited step may exceed the budget.
    group_bytes = 2 * (size + OVERHEAD)
    kept = (commit_every + 1) * batch_groups * group_bytes
    assert most_held <= max(max_bytes, kept + batch_groups * (group_bytes + 2 * 65_536))


async def open_admitted(run: Any, names: Iterable[str]) -> list[str]:
    """Open groups until one must wait; return the opened ones."""
    opened: list[str] = []
    with contextlib.suppress(RejectedError):
        for group_id in names:
            await run.open(group_id)
            opened.append(group_id)
    return opened


async def grow_and_seal(run: Any, group_id: str, size: int) -> None:
    """Reserve and store this number of bytes in each of the two samples."""
    for sample, trajectory_id in enumerate(members([group_id])):
        command = reserve_command(run.name, [(trajectory_id, 1, size)], writer="writer")
        (granted,) = await run_command_async(run.client, command)
        assert granted >= size
        await run.seal(group_id, sample, num_bytes=size)


def members(groups: Sequence[str]) -> list[str]:
    return [TrajectoryKey(group, sample).trajectory_id for group in groups for sample in range(2)]


def byte_reasons(client: redis.Redis, run: str, *, max_bytes: int = 0) -> list[str]:
    """Return the sentences about bytes, with another budget while nothing is starved."""
    seen = read_snapshot(client, run)
    budget = seen.budget._replace(max_bytes=max_bytes)
    found = reasons(replace(seen, budget=budget, num_ready=seen.config.batch_groups))
    return [each.sentence for each in found if each.kind == WaitKind.OUT_OF_BYTES]


async def test_budget_below_the_kept_steps_is_reported_as_too_small(run: Any) -> None:
    await run.open("g")
    for sample in range(2):
        await run.seal("g", sample, num_bytes=1_000_000)
    await run.plan("g")

    held, small = byte_reasons(run.store, run.name, max_bytes=10_000)

    assert read_budget(run.store, run.name).planned == 2 * (1_000_000 + OVERHEAD)
    assert "max_bytes=10,000 is less than the 1 retained steps take" in small
    assert "2,008,192 of max_bytes=10,000 are held" in held
    assert byte_reasons(run.store, run.name) == []


async def test_too_small_budget_names_the_observer_of_the_oldest_step(run: Any) -> None:
    await run.plan_steps(2)
    session = await run.start("s")
    for observer in ("slow", "quick"):
        where = {"observer": observer, "first_step": 1, "expiry_s": 60}
        await declare_observer(run.client, run.name, **where)
    await note_observed(run.client, run.name, observer="quick", seen=2)

    early = byte_reasons(run.store, run.name, max_bytes=5_000)
    await run.commit(session, 1)
    late = byte_reasons(run.store, run.name, max_bytes=5_000)

    assert early[-1].endswith("was seen by every observer")
    assert late[-1].endswith(
        "was seen by every observer: 'slow' has seen step 0, and expires in 60 s"
    )


async def test_an_evaluation_holds_bytes_until_its_payload_is_released(run: Any) -> None:
    await run.open("e", num_samples=3, num_opened=2, purpose=Purpose.EVAL)
    await run.seal("e", 0, num_bytes=1_000)
    before = await run.last_wake_up()

    await run.carry_out(
        GroupEvaluated(group_id="e", keys=(TrajectoryKey("e", 0),), result=None, total=None)
    )
    ended = run.held()
    woken = await run.last_wake_up()
    await run.release("e/0/0", "e/1/0")

    assert (ended.reserved, ended.stored) == (65_536, 1_000 + OVERHEAD)
    assert woken != before
    assert run.held().held == 0
