"""The pass rate of recent groups, for `turnstream why` and for generators."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from turnstream.store.waits.read_waits import read_waits
from turnstream.store.waits.wait_reasons import RecentGroups, recent_groups
from turnstream.types import TrajectoryState
from turnstream_server.bus.admin.forks import fork_run
from turnstream_server.bus.queries.run_snapshot import read_snapshot

pytestmark = pytest.mark.redis


async def drop(run: Any, *groups: str) -> None:
    for name in groups:
        await run.open(name, num_samples=1)
        await run.seal(name, 0)
        await run.settle(name, TrajectoryState.FILTERED, 0)


def recent(client: redis.Redis, run: str) -> RecentGroups:
    """As `turnstream why` sees it; a generator sees the same."""
    found = recent_groups(read_snapshot(client, run))
    waits = read_waits(client, run)
    assert waits is not None
    assert recent_groups(waits) == found
    return found


async def test_groups_decided_before_the_last_two_batches_are_not_judged(
    client: redis.Redis, run: Any
) -> None:
    await drop(run, "a", "b", "c")
    at_first = recent(client, run.name)
    await run.plan_steps(1)
    await drop(run, "d")
    after_one = recent(client, run.name)
    await run.plan_steps(1)
    after_two = recent(client, run.name)
    await run.plan_steps(1)
    await drop(run, "e", "f")
    after_three = recent(client, run.name)

    assert at_first == RecentGroups(since_step=0, num_dropped=3, num_decided=3)
    assert after_one == RecentGroups(since_step=0, num_dropped=4, num_decided=5)
    assert after_two == RecentGroups(since_step=1, num_dropped=1, num_decided=2)
    assert after_three == RecentGroups(since_step=2, num_dropped=2, num_decided=3)


async def test_a_manifest_that_is_written_again_leaves_the_window_where_it_was(
    client: redis.Redis, run: Any
) -> None:
    await run.plan_steps(2)
    await drop(run, "a")
    before = recent(client, run.name)

    await run.plan("g2", step=2)

    assert recent(client, run.name) == before


async def test_the_history_of_a_fork_is_not_judged(client: redis.Redis, run: Any) -> None:
    await run.plan_steps(2)
    await run.commit(await run.start("s"), 1, 2)

    fork_run(client, run.name, "a fork of it", run.token(2))

    assert recent(client, "a fork of it") == RecentGroups(
        since_step=2, num_dropped=0, num_decided=0
    )
