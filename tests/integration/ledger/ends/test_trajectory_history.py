"""The counts of the ledger, and the history of one trajectory."""

from typing import Any

import pytest
import redis

from turnstream.errors import RunNotFoundError
from turnstream.records.events import decode_event
from turnstream.types import Event, TrajectoryState
from turnstream_server.ledger.core import scan
from turnstream_server.ledger.core.scan import server_ms
from turnstream_server.ledger.queries.ledger import (
    LedgerMismatchError,
    read_ledger,
    run_summary,
)
from turnstream_server.ledger.queries.trajectory_history import Trajectory, read_history
from turnstream_server.ledger.sessions.session_writes import TrainerRank
from turnstream_server.ledger.sessions.sessions import acknowledge_committed


async def test_every_accepted_trajectory_is_in_one_state(run: Any) -> None:
    await run.plan_steps(3)
    await run.open("filtered", num_sealed=2)
    await run.settle("filtered", TrajectoryState.FILTERED, 0, 1)
    await run.open("mixed", num_samples=4, num_sealed=2)
    await run.kill("mixed", 1)
    await run.abandon("mixed", 2)
    session = await run.start("s")
    first = await run.step(session, 1)
    await run.step(session, 2)
    await acknowledge_committed(run.client, run.name, TrainerRank(1), first)

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


def test_a_run_that_does_not_exist_has_no_ledger(client: redis.Redis) -> None:
    with pytest.raises(RunNotFoundError):
        read_ledger(client, "none")
    with pytest.raises(RunNotFoundError):
        run_summary(client, "none")


def history(run: Any, name: str) -> Trajectory:
    return read_history(run.store, run.name, name)


def told(run: Any, name: str) -> list[tuple[str, str]]:
    """Return (name, details) of the events, whose times must be in order and not in the future."""
    now_ms = server_ms(run.store)
    events = history(run, name).events
    times = [event.at_ms for event in events]
    assert times == sorted(times)
    assert all(now_ms - 60_000 < ms <= now_ms for ms in times)
    return [(event.name, event.details) for event in events]


async def test_history_lists_every_event_of_a_committed_trajectory(run: Any) -> None:
    await run.plan_steps(2)
    await run.commit(await run.start("s"), 2)

    assert told(run, "g1/0/0") == [
        ("group opened", ""),
        ("sealed", "completed, reward 1"),
        ("planned", "in step 1"),
        ("stepped", "in step 1"),
        ("committed", "by the checkpoint of step 2"),
    ]


async def test_history_has_a_posted_reward_before_the_plan(run: Any) -> None:
    await run.open("g")
    await run.seal("g", 0, awaits_reward=True)
    waiting = history(run, "g/0/0")
    await run.post_reward("g", 0, 0.5)

    seen = history(run, "g/0/0")

    assert seen.state is TrajectoryState.SEALED
    assert (waiting.reward, seen.reward) == (1.0, 0.5)
    assert told(run, "g/0/0")[1:] == [
        ("sealed", "completed, its reward comes later"),
        ("reward posted", "0.5"),
    ]


async def test_history_has_the_deadline_of_a_missing_reward(run: Any) -> None:
    await run.open("g")
    await run.seal("g", 0, awaits_reward=True)
    await run.client.zadd(run.keys.deadlines, {"reward:g/0/0": 1})

    await run.fire()

    assert told(run, "g/0/0")[2:] == [("deadline fired", "of its reward")]


async def test_history_of_each_attempt_has_the_refill_of_its_sample(start_run: Any) -> None:
    run = await start_run(deadline_policy="refill", max_refills=2, group_deadline_s=9)
    await run.open("g")
    await run.make_due()
    await run.fire()
    await run.abandon("g", 0)
    await run.grant("g", 0)
    await run.open("g", attempt=1, num_opened=1)

    assert told(run, "g/0/0") == [
        ("group opened", ""),
        ("deadline fired", "of its group, after 0 refills"),
        ("abandoned", "crashed"),
        ("refill granted", "attempt 1 of its sample"),
    ]
    of_refill = {name for name, _ in told(run, "g/0/1")}
    assert "refill granted" in of_refill
    assert "abandoned" not in of_refill
    assert "refill granted" not in {name for name, _ in told(run, "g/1/0")}


async def test_history_keeps_the_reason_when_its_events_are_trimmed(run: Any) -> None:
    await run.open("g", num_sealed=1)
    await run.kill("g", 0)
    before = history(run, "g/0/0")

    await run.client.xtrim(run.keys.events, maxlen=0)

    seen = history(run, "g/0/0")
    assert (before.events[-1].name, before.events[-1].details) == ("dead", "checksum")
    assert (before.is_whole, seen.is_whole) == (True, False)
    assert (seen.state, seen.reason, seen.events) == (TrajectoryState.DEAD, "checksum", ())


async def test_history_of_an_undone_step_has_only_its_plan(run: Any) -> None:
    await run.plan_steps(2)
    await run.commit(await run.start("s"), 1)
    await run.step(await run.start("t", run.token(1)), 2)
    stepped = told(run, "g2/0/0")
    await run.start("u", run.token(1))

    assert stepped[-1] == ("stepped", "in step 2")
    assert told(run, "g2/0/0")[-1] == ("planned", "in step 2")


async def test_history_decodes_no_seal_of_another_trajectory(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every event of the run was decoded: 0.3 CPU s at 16,000 trajectories.
    for number in range(20):
        await run.open(f"g{number}", num_sealed=2)
    kinds: list[str] = []

    def decode(record: bytes) -> Event:
        event = decode_event(record)
        kinds.append(type(event).__name__)
        return event

    monkeypatch.setattr(scan, "decode_event", decode)
    history = read_history(run.store, run.name, "g7/1/0")

    assert [event.name for event in history.events] == ["group opened", "sealed"]
    assert kinds.count("SealedTrajectory") == 1
