"""Snapshots of a run that waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from turnstream_server.bus.core.frontier import Frontier
from turnstream_server.bus.queries.run_snapshot import RunSnapshot

FRONTIER = Frontier(
    planned=2,
    stepped=2,
    committed=2,
    session_epoch=1,
    session="s",
    dp_world_size=1,
    lineage="main",
    num_opened_groups=8,
    num_live_groups=8,
    is_closed=False,
)
STARVED = RunSnapshot(
    run="maze",
    frontier=FRONTIER,
    planner="p",
    planner_left_s=5.0,
    batch_groups=4,
    max_planned_ahead=1,
    most_live_groups=16,
    num_ready=1,
    num_waiting=1,
)


@pytest.fixture
def starved() -> Callable[..., RunSnapshot]:
    """`starved(frontier={...}, **changes)`: the trainer waits for step 3.

    One group is ready, one is open, and nothing is known of it.
    """

    def make(*, frontier: dict[str, Any] | None = None, **changes: Any) -> RunSnapshot:
        return replace(STARVED, frontier=replace(FRONTIER, **(frontier or {})), **changes)

    return make
