"""What `turnstream why` goes by behind a withdrawal: the groups that were dropped at each plan."""

from __future__ import annotations

from typing import Any

import pytest

from turnstream.types import TrajectoryState

pytestmark = pytest.mark.redis


async def drop(run: Any, group_id: str) -> None:
    await run.open(group_id)
    for sample in range(2):
        await run.seal(group_id, sample)
    await run.settle(group_id, TrajectoryState.FILTERED, 0, 1)


async def test_a_plan_that_stands_keeps_the_number_of_groups_that_were_dropped_before_it(
    run: Any, withdraw_from: Any
) -> None:
    await run.plan_steps(2)
    await drop(run, "later")
    await run.plan_steps(1)

    await withdraw_from(run, 3)

    assert await run.client.hget(run.keys.frontier, "at_plans") == b"2:0:2"


async def test_behind_the_last_plan_that_stands_the_groups_that_were_dropped_so_far_count(
    run: Any, withdraw_from: Any
) -> None:
    await run.plan_steps(1)
    await drop(run, "early")
    await run.plan_steps(2)

    await withdraw_from(run, 2)

    assert await run.client.hget(run.keys.frontier, "at_plans") == b"1:1:1"
