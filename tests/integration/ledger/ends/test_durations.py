"""Durations and pass rate of a run, in both views."""

import re
from typing import Any

from turnstream.errors import WaitKind
from turnstream.store.waits.read_waits import read_waits
from turnstream.store.waits.wait_reasons import RecentGroups, reasons, recent_groups
from turnstream.store.waits.wait_snapshot import WaitSnapshot
from turnstream.types import Purpose, RecoveryToken, TrajectoryState
from turnstream_server.ledger.admin.forks import fork_run
from turnstream_server.ledger.queries.run_snapshot import read_snapshot
from turnstream_server.ledger.sessions.session_writes import TrainerRank
from turnstream_server.ledger.sessions.sessions import record_rank

AGO_S = 100
"""So much older `pass_time` makes everything that was noted by then."""


def pass_time(run: Any) -> None:
    """Make all recorded times older."""
    for field in ("session_ms", "opened_ms"):
        if run.store.hexists(run.keys.frontier, field):
            run.store.hincrby(run.keys.frontier, field, -AGO_S * 1_000)
    for field in run.store.hkeys(run.keys.times):
        run.store.hincrby(run.keys.times, field, -AGO_S * 1_000)


def both_views(run: Any) -> list[WaitSnapshot]:
    """Return the run as `turnstream why` sees it, and as a generator sees it."""
    waits = read_waits(run.store, run.name)
    assert waits is not None
    return [read_snapshot(run.store, run.name), waits]


def ages(run: Any) -> dict[str, int | None]:
    """Return how often time has passed since, in both views."""
    one, other = (
        {name: s if s is None else int(s / AGO_S) for name, s in each.durations._asdict().items()}
        for each in both_views(run)
    )
    assert one == other
    return one


async def test_a_step_is_awaited_since_the_one_before_was_stepped(run: Any) -> None:
    made = ages(run)
    pass_time(run)
    waiting = ages(run)
    await run.plan_steps(1)
    session = await run.start("s")
    pass_time(run)
    await run.step(session, 1)
    stepped = ages(run)
    pass_time(run)
    await run.step(session, 1)

    assert made == {"trainer_s": None, "step_s": 0, "opened_s": None}
    assert waiting == {"trainer_s": None, "step_s": 1, "opened_s": None}
    assert stepped == {"trainer_s": None, "step_s": 0, "opened_s": 1}
    assert ages(run) == {"trainer_s": None, "step_s": 1, "opened_s": 2}


async def test_trainer_has_a_step_since_its_plan_or_session_start(run: Any) -> None:
    await run.plan_steps(1)
    pass_time(run)
    before = ages(run)
    await run.start("first")
    first = ages(run)
    pass_time(run)
    await run.start("first")
    await run.plan("g1", step=1)
    again = ages(run)
    await run.start("second")

    assert [each["trainer_s"] for each in (before, first, again)] == [1, 0, 1]
    assert ages(run)["trainer_s"] == 0


async def test_groups_are_counted_from_the_newest_that_was_opened_to_train(run: Any) -> None:
    await run.open("a")
    pass_time(run)
    await run.open("a")
    await run.open("e", purpose=Purpose.EVAL)
    old = ages(run)
    await run.open("b")

    assert old["opened_s"] == 1
    assert ages(run)["opened_s"] == 0


async def test_a_fork_waits_and_is_judged_since_it_was_made(run: Any) -> None:
    await run.plan_steps(2)
    await run.commit(await run.start("s"), 1)
    pass_time(run)

    fork_run(run.store, run.name, "a fork that waits", run.token(1))

    fork = run.run_named("a fork that waits")
    assert ages(fork) == {"trainer_s": None, "step_s": 0, "opened_s": None}
    assert recent(fork) == RecentGroups(since_step=1, num_dropped=0, num_decided=0)


async def test_a_rollback_forgets_when_the_steps_were_trained_that_come_again(run: Any) -> None:
    await run.plan_steps(4)
    await run.commit(await run.start("s"), 1, 3)
    pass_time(run)
    before = await run.hash_of("times")

    await run.start("again", run.token(2))

    after = await run.hash_of("times")
    gone = {b"stepped:3", b"committed:3"}
    assert gone < before.keys()
    assert after.keys() == (before.keys() - gone) | {b"committed:2"}
    assert int(after[b"committed:2"]) > int(before[b"stepped:3"]) + AGO_S * 1_000 / 2
    assert ages(run)["trainer_s"] == 0


async def test_resumed_step_keeps_its_commit_time_and_an_undone_one_does_not(run: Any) -> None:
    await run.plan_steps(1)
    await run.commit(await run.start("s"), 1)
    await run.client.hset(run.keys.times, "committed:1", 7)

    await run.start("restarted", run.token(1))
    restarted = await run.hash_of("times")
    await run.start("at the start", RecoveryToken(lineage="main", step=0, chain_hash=""))
    undone = await run.hash_of("times")
    await run.start("again", run.token(1))

    assert restarted[b"committed:1"] == b"7"
    assert undone.keys() == {b"planned:1"}
    assert (await run.hash_of("times"))[b"committed:1"] != b"7"


async def test_times_go_with_the_batch_before(released: Any) -> None:
    await released.compact(1)
    first = await released.hash_of("times")
    await released.compact(2)

    words = (b"planned:1", b"stepped:1", b"committed:1")
    assert first.keys() > {*words}
    assert first.keys() - (await released.hash_of("times")).keys() == {*words}


async def test_both_views_have_the_duration_and_the_ranks_behind(run: Any) -> None:
    await run.plan_steps(2)
    session = await run.start("s", dp_world_size=3)
    for rank, step in ((0, 2), (2, 1)):
        caller, own_hash = TrainerRank(session.session_epoch, "", rank), run.manifests[step].hash
        heard: dict[str, Any] = {"step": step, "manifest_hash": own_hash, "has": True}
        await record_rank(run.client, run.name, caller, **heard)
    pass_time(run)

    for view in both_views(run):
        (found,) = (each for each in reasons(view) if each.kind == WaitKind.TRAINER_NOT_STEPPED)
        words = r"trainer session 1 has it for 1\d\d s; dp_rank 1 did not ask for it$"
        assert re.search(words, found.sentence)
        assert found.facts["behind"] == "1"
    run.store.hset(run.keys.frontier, "session", "")  # the session has ended
    assert [each.behind for each in both_views(run)] == [(), ()]


async def drop(run: Any, *groups: str) -> None:
    for name in groups:
        await run.open(name, num_samples=1, num_sealed=1)
        await run.settle(name, TrajectoryState.FILTERED, 0)


def recent(run: Any) -> RecentGroups:
    one, other = map(recent_groups, both_views(run))
    assert one == other
    return one


async def test_groups_decided_before_the_last_two_batches_are_not_judged(run: Any) -> None:
    await drop(run, "a", "b", "c")
    at_first = recent(run)
    await run.plan_steps(1)
    await drop(run, "d")
    after_one = recent(run)
    await run.plan_steps(1)
    after_two = recent(run)
    await run.plan_steps(1)
    await drop(run, "e", "f")
    after_three = recent(run)

    assert at_first == RecentGroups(since_step=0, num_dropped=3, num_decided=3)
    assert after_one == RecentGroups(since_step=0, num_dropped=4, num_decided=5)
    assert after_two == RecentGroups(since_step=1, num_dropped=1, num_decided=2)
    assert after_three == RecentGroups(since_step=2, num_dropped=2, num_decided=3)


async def test_a_manifest_that_is_written_again_leaves_the_window_where_it_was(run: Any) -> None:
    await run.plan_steps(2)
    await drop(run, "a")
    before = recent(run)

    await run.plan("g2", step=2)

    assert recent(run) == before


async def test_a_damaged_snapshot_leaves_it_to_the_events(run: Any) -> None:
    for group_id in ("gone", "kept"):
        await run.open(group_id)
    (first, _), _ = await run.client.xrange(run.keys.events)
    await run.client.xdel(run.keys.events, first)
    await run.client.hset(run.keys.snapshot, "record", b"\x00" * 64)

    members = read_snapshot(run.store, run.name).members

    found = {each.key.group_id: each.since_s is None for each in members}
    assert found == {"gone": True, "kept": False}
