"""The life of one trajectory: everything that the store still knows of it, in order."""

from __future__ import annotations

import json
import re
from io import StringIO
from typing import Any

import pytest
import redis

from turnstream.store.leases import take_over_command
from turnstream.store.scripts import run_command
from turnstream.types import TrajectoryState
from turnstream_server.bus.histories import TrajectoryHistory, read_history
from turnstream_server.bus.pages import server_ms
from turnstream_server.jobs.ledger import history_json, print_history
from turnstream_server.jobs.screen import Screen

pytestmark = pytest.mark.redis


def history(client: redis.Redis, run: Any, name: str) -> TrajectoryHistory:
    return read_history(client, run.name, name)


def told(client: redis.Redis, run: Any, name: str) -> list[tuple[str, str]]:
    """What happened to a trajectory; what has a time has it in order, and none is in the future."""
    now_ms = server_ms(client)
    entries = history(client, run, name).entries
    times = [entry.at_ms for entry in entries if entry.at_ms is not None]
    assert times == sorted(times)
    assert all(now_ms - 60_000 < ms <= now_ms for ms in times)
    for entry in entries:
        assert (entry.at_ms is None) == (entry.age_s is None)
    return [(entry.what, entry.text) for entry in entries]


async def forget_events(run: Any) -> None:
    """What trimming does when the planner has a snapshot of all of them."""
    await run.client.xtrim(run.keys.events, maxlen=0)


async def test_a_trained_trajectory_was_opened_sealed_planned_stepped_and_committed(
    client: redis.Redis, run: Any
) -> None:
    await run.plan_steps(2)
    await run.commit(await run.start("s"), 2)

    assert told(client, run, "g1/0/0") == [
        ("group opened", ""),
        ("sealed", "completed, reward 1"),
        ("planned", "in step 1"),
        ("stepped", "in step 1"),
        ("committed", "by the checkpoint of step 2"),
    ]
    assert all(entry.at_ms for entry in history(client, run, "g1/0/0").entries)


async def test_a_reward_that_was_posted_is_told_before_the_batch_is_planned(
    client: redis.Redis, run: Any
) -> None:
    await run.open("g")
    await run.seal("g", 0, awaits_reward=True)
    waiting = history(client, run, "g/0/0")
    await run.post_reward("g", 0, 0.5)

    seen = history(client, run, "g/0/0")

    assert seen.state is TrajectoryState.SEALED
    assert seen.reward == 0.5
    assert waiting.reward != 0.5
    assert told(client, run, "g/0/0")[1:] == [
        ("sealed", "completed, its reward comes later"),
        ("reward posted", "0.5"),
    ]


async def test_a_reward_that_came_too_late_is_told_to_have_changed_nothing(
    client: redis.Redis, run: Any
) -> None:
    await run.open("g")
    await run.seal("g", 0, awaits_reward=True)
    await run.settle("g", TrajectoryState.EXPIRED, 0)
    await run.post_reward("g", 0, 0.5)

    seen = told(client, run, "g/0/0")

    assert [what for what, _ in seen] == ["group opened", "sealed", "expired", "late reward"]
    assert "changed nothing" in seen[-1][1]


async def test_no_reward_is_told_of_where_none_came_before_its_deadline(
    client: redis.Redis, run: Any
) -> None:
    await run.open("g")
    await run.seal("g", 0, awaits_reward=True)
    await run.client.zadd(run.keys.deadlines, {"reward:g/0/0": 1})

    await run.fire()

    assert told(client, run, "g/0/0") == [
        ("group opened", ""),
        ("sealed", "completed, its reward comes later"),
        ("deadline fired", "of its reward"),
    ]


async def test_an_attempt_that_was_given_up_and_the_one_after_it_name_each_other(
    client: redis.Redis, start_run: Any, async_client: Any
) -> None:
    run = await start_run(async_client, deadline_policy="refill", max_refills=2, group_deadline_s=9)
    await run.open("g")
    await run.make_due()
    await run.fire()
    await run.abandon("g", 0)
    await run.grant("g", 0)
    await run.open("g", attempt=1, num_begun=1)

    assert told(client, run, "g/0/0") == [
        ("group opened", ""),
        ("deadline fired", "of its group, after 0 refills"),
        ("abandoned", "crashed"),
        ("tried again", "attempt 1 of its sample was granted"),
    ]
    assert ("attempt granted", "refill 1 of its group") in told(client, run, "g/0/1")
    assert not {"abandoned", "tried again"} & {what for what, _ in told(client, run, "g/0/1")}
    assert "tried again" not in {what for what, _ in told(client, run, "g/1/0")}


async def test_who_took_a_trajectory_over_is_told_also_once_it_is_sealed(
    client: redis.Redis, run: Any
) -> None:
    await run.open("g", num_samples=1)
    lives: list[list[tuple[str, str]]] = []
    for writer in ("gen-2", "gen-3"):
        client.zadd(run.keys.leases, {"g/0/0": 1})
        run_command(client, take_over_command(run.name, "g/0/0", writer=writer))
        lives.append(told(client, run, "g/0/0")[1:])
    client.hset(run.keys.ledger, "g/0/0", "sealed:3")

    assert lives == [
        [("taken over", "once, last by gen-2; when is not noted")],
        [("taken over", "2 times, last by gen-3; when is not noted")],
    ]
    assert told(client, run, "g/0/0")[1] == ("taken over", "2 times; when is not noted")


async def test_a_trajectory_that_died_is_told_to_be_dead_also_without_its_event(
    client: redis.Redis, run: Any
) -> None:
    await run.open("g")
    await run.seal("g", 0)
    await run.kill("g", 0)
    before = told(client, run, "g/0/0")
    dead_ms = history(client, run, "g/0/0").entries[-1].at_ms

    await forget_events(run)
    of_another = [entry.what for entry in history(client, run, "g/1/0").entries]

    *_, dead, not_known = history(client, run, "g/0/0").entries
    assert before[-1] == ("dead", "checksum")
    assert (dead.what, dead.text, dead.at_ms) == ("dead", "checksum", dead_ms)
    assert not_known.what == "not known"
    assert "dead" not in of_another


async def test_what_is_trimmed_is_said_to_be_no_longer_known(client: redis.Redis, run: Any) -> None:
    await run.open("g")
    await run.seal("g", 0, awaits_reward=True)
    await run.seal("g", 1)
    await run.post_reward("g", 0, 0.5)
    await run.plan("g")
    whole = history(client, run, "g/0/0").is_whole

    await forget_events(run)

    seen = history(client, run, "g/0/0")
    assert [(entry.what, entry.at_ms is not None) for entry in seen.entries] == [
        ("group opened", False),
        ("sealed", False),
        ("reward posted", False),
        ("planned", True),
        ("not known", False),
    ]
    assert [e.text for e in seen.entries[:3]] == ["when is no longer known"] * 3
    assert (whole, seen.is_whole) == (True, False)


async def test_a_step_that_was_undone_and_trained_again_is_told_so(
    client: redis.Redis, run: Any
) -> None:
    await run.plan_steps(3)
    await run.commit(await run.start("s"), 1)
    await run.step(await run.start("t", run.token(1)), 2)
    again = await run.start("u", run.token(1))
    undone = told(client, run, "g2/0/0")
    await run.step(again, 2)

    assert undone[2:] == [
        ("planned", "in step 2"),
        ("undone", "the trainer went back behind step 1"),
    ]
    assert [what for what, _ in told(client, run, "g2/0/0")[3:]] == ["undone", "stepped"]
    for untouched in ("g1/0/0", "g3/0/0"):
        assert "undone" not in {what for what, _ in told(client, run, untouched)}


async def test_a_plan_that_was_made_after_a_rollback_was_not_undone_by_it(
    client: redis.Redis, run: Any
) -> None:
    await run.plan_steps(2)
    await run.commit(await run.start("s"), 1)
    await run.step(await run.start("t", run.token(1)), 2)
    await run.start("u", run.token(1))
    undone = history(client, run, "g2/0/0").entries[-1]

    client.hset(run.keys.times, "planned:2", (undone.at_ms or 0) + 1)

    assert undone.what == "undone"
    assert "undone" not in [entry.what for entry in history(client, run, "g2/0/0").entries]


async def test_of_a_batch_that_is_over_a_later_checkpoint_says_nothing(
    client: redis.Redis, released: Any
) -> None:
    await released.fold(1)
    await released.fold(2)

    seen = [each for each in history(client, released, "g1/0/0").entries if each.what != "sealed"]

    assert [(entry.what, entry.text) for entry in seen if "step" in entry.text] == [
        ("planned", "in step 1; when is no longer known"),
        ("stepped", "in step 1; when is no longer known"),
    ]
    assert ("committed", "when is no longer known") in [(e.what, e.text) for e in seen]


async def test_programs_are_told_the_same(client: redis.Redis, run: Any, server: Any) -> None:
    await run.open("g")

    (opened,) = json.loads(history_json(server.url, run.name, "g/0/0"))["entries"]

    first = history(client, run, "g/0/0").entries[0]
    assert (opened["what"], opened["at_ms"]) == ("group opened", first.at_ms)
    assert opened["age_s"] >= 0


async def test_people_are_told_what_when_and_how_long_ago(
    client: redis.Redis, run: Any, server: Any
) -> None:
    await run.open("g")
    await run.seal("g", 0)
    screen = StringIO()

    print_history(server.url, run.name, "g/0/0", Screen(screen, width=120))

    printed = screen.getvalue()
    when = r"│ \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+00:00, \d+ s ago │"
    assert re.search(rf"group opened +{when}", printed)
    assert re.search(rf"sealed +{when} completed, reward 1", printed)
    assert re.search(r"state +│ +│ sealed", printed)
