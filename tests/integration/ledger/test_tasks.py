"""The state of a prompt after the end of its group."""

from typing import Any

import pytest

from testkit.runs.tasks import next_task
from turnstream.batching.fold.decisions import GroupCut
from turnstream.store.run.tasks import (
    NoTask,
    Prompt,
    PromptCounts,
    TakenTask,
    add_prompts,
    read_prompt_counts,
)
from turnstream.types import TrajectoryState


def give(run: Any, *uids: str) -> None:
    prompts = [Prompt(prompt_uid=uid, payload=uid.encode(), num_samples=2) for uid in uids]
    add_prompts(run.store, run.name, prompts)


async def take(run: Any) -> str:
    taken = next_task(run.store, run.name, writer="w")
    assert isinstance(taken, TakenTask), taken
    assert taken.task.payload.decode() == taken.task.group.prompt_uid
    return taken.task.group.group_id


def counts(run: Any) -> tuple[int, int, int, int]:
    """Left, given out, trained, filtered."""
    found = read_prompt_counts(run.store, run.name)
    return found.num_left, found.num_given, found.num_trained, found.num_filtered


def stored(run: Any) -> set[bytes]:
    """The numbers of the prompts that are kept."""
    names: Any = run.store.hkeys(run.keys.prompts)
    return {name for name in names if name.isdigit()}


@pytest.mark.parametrize("state", [TrajectoryState.INCOMPLETE, TrajectoryState.EXPIRED])
async def test_a_prompt_whose_group_failed_is_given_out_again_before_the_next(
    run: Any, state: TrajectoryState
) -> None:
    give(run, "a", "b")
    first = await take(run)
    before = counts(run)

    await run.settle(first, state)
    again = counts(run)
    groups = [await take(run) for _ in range(2)]

    assert (first, groups) == ("a#1", ["a#2", "b#1"])
    assert (before, again) == ((1, 1, 0, 0), (2, 0, 0, 0))
    assert counts(run) == (0, 2, 0, 0)


async def test_a_prompt_is_given_out_again_once_however_often_the_planner_settles(run: Any) -> None:
    give(run, "a")
    group_id = await take(run)

    for _ in range(2):
        await run.settle(group_id, TrajectoryState.INCOMPLETE)
    await take(run)
    await run.settle(group_id, TrajectoryState.INCOMPLETE)

    assert counts(run) == (0, 1, 0, 0)


async def test_prompt_of_a_filtered_or_planned_group_is_done_and_removed(run: Any) -> None:
    give(run, "a", "b", "c")
    filtered, planned = await take(run), await take(run)
    await run.seal(planned, 0)
    await run.seal(planned, 1)

    await run.settle(filtered, TrajectoryState.FILTERED)
    await run.plan(planned)

    assert counts(run) == (1, 0, 1, 1)
    assert stored(run) == {b"3"}
    assert run.store.hkeys(run.keys.tasks) == []


@pytest.mark.both_servers
async def test_run_with_all_prompts_done_reports_it(run: Any) -> None:
    give(run, "a")
    await run.settle(await take(run), TrajectoryState.FILTERED)

    found = read_prompt_counts(run.store, run.name)

    assert found == PromptCounts(
        num_added=1, num_left=0, num_given=0, num_trained=0, num_filtered=1
    )
    assert found.is_exhausted
    assert not read_prompt_counts(run.store, "another run").is_exhausted


async def test_planned_prompt_wakes_waiting_generators(run: Any) -> None:
    # The plan of a cut group woke no generator: they learned the end only when their wait ended.
    give(run, "a")
    group_id = await take(run)
    for sample in range(2):
        await run.seal(group_id, sample)
    await run.carry_out(GroupCut(group_id=group_id, reason="enough"))
    found = next_task(run.store, run.name, writer="v")
    assert isinstance(found, NoTask)

    await run.plan(group_id)
    woken = run.store.xread({run.keys.wake: found.wake_id})
    ended = next_task(run.store, run.name, writer="v")

    assert woken
    assert isinstance(ended, NoTask)
    assert ended.is_exhausted
