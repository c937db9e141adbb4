"""The pass rate of `turnstream why` after a withdrawal: groups dropped at each plan."""

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


@pytest.mark.parametrize(
    ("first", "num_later", "at_plans"),
    [
        pytest.param(3, 1, b"2:0:2", id="its own"),
        # of two plans alone it is known what was dropped before them
        pytest.param(2, 2, b"1:1:1", id="all so far, where its own is not known any more"),
    ],
)
async def test_last_remaining_plan_keeps_the_number_of_earlier_dropped_groups(
    run: Any, withdraw_from: Any, first: int, num_later: int, at_plans: bytes
) -> None:
    await run.plan_steps(first - 1)
    await drop(run, "dropped")
    await run.plan_steps(num_later)

    await withdraw_from(run, first)

    assert await run.client.hget(run.keys.frontier, "at_plans") == at_plans
