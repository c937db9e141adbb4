from __future__ import annotations

from typing import Any

import pytest
import redis

from turnstream.errors import RunNotFoundError
from turnstream.store.run.runs import list_runs
from turnstream.types import TrajectoryState, VersionAnnounced
from turnstream_server.bus.queries.ledger import (
    LedgerMismatchError,
    read_ledger,
    run_summary,
)
from turnstream_server.bus.sessions.sessions import acknowledge_committed, announce_version

pytestmark = pytest.mark.redis


async def test_every_accepted_trajectory_is_in_one_state(run: Any) -> None:
    await run.plan_steps(3)
    await run.open("filtered")
    await run.seal("filtered", 0)
    await run.seal("filtered", 1)
    await run.settle("filtered", TrajectoryState.FILTERED, 0, 1)
    await run.open("mixed", num_samples=4)
    await run.seal("mixed", 0)
    await run.seal("mixed", 1)
    await run.kill("mixed", 1)
    await run.abandon("mixed", 2)
    session = await run.start("s")
    first = await run.step(session, 1)
    await run.step(session, 2)
    await acknowledge_committed(run.client, run.name, session_epoch=1, token=first)

    counts = run.ledger()

    counts.check()
    assert counts.accepted == 12
    assert {state: number for state, number in counts.by_state.items() if number} == {
        TrajectoryState.OPEN: 1,
        TrajectoryState.SEALED: 1,
        TrajectoryState.PLANNED: 2,
        TrajectoryState.STEPPED: 2,
        TrajectoryState.COMMITTED: 2,
        TrajectoryState.FILTERED: 2,
        TrajectoryState.ABANDONED: 1,
        TrajectoryState.DEAD: 1,
    }
    assert counts.num_trained == 4


async def test_the_ledger_of_a_new_run_is_empty(run: Any, client: redis.Redis) -> None:
    counts = read_ledger(client, run.name)

    counts.check()
    assert counts.accepted == 0
    assert set(counts.by_state) == set(TrajectoryState)


@pytest.mark.parametrize(
    ("state", "change"), [("sealed", 1), ("accepted", 1), ("planned", -1), ("open", -1)]
)
async def test_a_ledger_that_was_changed_by_hand_does_not_add_up(
    run: Any, state: str, change: int
) -> None:
    await run.plan_steps(1)
    await run.client.hincrby(run.keys.counts, state, change)
    if state == "planned":  # the sum still fits
        await run.client.hincrby(run.keys.counts, "sealed", -change)

    counts = run.ledger()

    with pytest.raises(LedgerMismatchError, match="accepted"):
        counts.check()


async def test_a_run_is_summed_up_for_people(run: Any, client: redis.Redis) -> None:
    await run.plan_steps(2)
    session = await run.start("s")
    await run.step(session, 1)
    announced = VersionAnnounced(version=3, step=1, lineage="main")
    await announce_version(run.client, run.name, announced, session_epoch=1)

    summary = run_summary(client, run.name)

    assert (summary.run, summary.planner) == (run.name, "p")
    assert (summary.frontier.planned, summary.frontier.stepped) == (2, 1)
    assert (summary.frontier.session, summary.frontier.dp_world_size) == ("s", 1)
    assert summary.ledger.num_trained == 2
    assert summary.newest_version == announced
    assert run.name in list_runs(client)


def test_a_run_that_does_not_exist_has_no_ledger(client: redis.Redis) -> None:
    with pytest.raises(RunNotFoundError):
        read_ledger(client, "none")
    with pytest.raises(RunNotFoundError):
        run_summary(client, "none")
