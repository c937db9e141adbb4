from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testkit.runs.run_driver import Drive, RunDriver
from turnstream.batching.fold.capacity import admitting_step, capacity, most_live_groups
from turnstream.errors import (
    ConflictError,
    EndOfRunError,
    GroupTooLargeError,
    InvalidTurnError,
    RejectedError,
    RunNotFoundError,
)
from turnstream.store.client.scripts import Command
from turnstream.store.run.credits import credit
from turnstream.store.run.groups import adopt_command, most_samples

pytestmark = pytest.mark.redis


def test_a_group_is_registered_once_and_each_sample_is_taken(run: RunDriver) -> None:
    first = run.do(run.open_group("g/0/0", "g/1/0"))
    again = run.do(run.open_group("g/0/0", "g/1/0"))

    assert first == again == [1, 1]
    assert run.events() == [b"opened g"]
    assert run.ledger() == {b"g/0/0": b"open:1:w", b"g/1/0": b"open:1:w"}
    assert run.counts() == {"accepted": 2, "open": 2}
    assert run.client.hget(run.keys.groups, "g") == b"2:open"
    assert run.client.hmget(run.keys.frontier, "live_groups", "opened_groups") == [b"1", b"1"]


def test_known_group_keeps_its_size_purpose_and_writers(run: RunDriver) -> None:
    run.do(run.open_group("g/0/0", num_samples=2, writer="first:w"))
    run.do(run.open_group("e/0/0", group="e", num_samples="2:eval"))

    mine = run.do(run.open_group("g/0/0", "g/1/0", writer="second"))

    assert mine == [b"CONFLICT g/0/0 is being written by first:w", 1]
    for group, size, message in [
        ("g", "3", "opened with 2 samples, not 3"),
        ("g", "2:eval", "for training or for evaluation"),
        ("e", "2", "for training or for evaluation"),
    ]:
        with pytest.raises(ConflictError, match=message):
            run.do(run.open_group(f"{group}/1/0", group=group, num_samples=size))


def test_a_run_that_was_never_created_can_neither_be_opened_nor_closed(
    missing_run: RunDriver,
) -> None:
    for command in (missing_run.open_group("g/0/0"), missing_run.close()):
        with pytest.raises(RunNotFoundError):
            missing_run.do(command)


def test_refusal_for_capacity_has_the_newest_wake_id(drive: Drive) -> None:
    run = drive(batch_groups=1, max_staleness=0, max_planned_ahead=0)
    run.do(run.open_group("g/0/0"))
    before = raw_refusal(run.client, run.open_group(group="b"))
    wake_id: Any = run.client.xadd(run.keys.wake, {"w": ""})

    after = raw_refusal(run.client, run.open_group(group="b"))

    assert before.split()[:2] == ["WAIT", "[0-0]"]
    assert after.split()[:2] == ["WAIT", f"[{wake_id.decode()}]"]
    # Further samples of a known group never wait.
    assert run.do(run.open_group("g/1/0", writer="other")) == [1]


def raw_refusal(client: redis.Redis, command: Command) -> str:
    with pytest.raises(redis.ResponseError) as refusal:
        client.execute_command(*command.words)
    return str(refusal.value)


def test_a_closed_run_takes_no_new_group_but_lets_old_ones_finish(run: RunDriver) -> None:
    run.do(run.open_group("g/0/0"))

    closed = [run.do(run.close()), run.do(run.close())]

    assert closed == [1, 0]
    assert run.events() == [b"opened g", b"closed"]
    assert run.client.xlen(run.keys.wake) == 1
    assert run.do(run.open_group("g/1/0")) == [1]
    for size in ("2", "2:eval"):
        with pytest.raises(EndOfRunError):
            run.do(run.open_group("h/0/0", group="h", num_samples=size))


def test_a_decided_group_takes_no_further_sample(run: RunDriver) -> None:
    run.do(run.open_group("g/0/0"))
    run.client.hset(run.keys.groups, "g", "2:filtered")

    assert run.do(run.open_group("g/0/0", "g/1/0")) == [
        1,
        b"CONFLICT [group] group g is already filtered",
    ]


def test_an_evaluation_is_admitted_where_training_must_wait_and_sealed_and_adopted(
    drive: Drive,
) -> None:
    run = drive(batch_groups=1, max_staleness=0, max_planned_ahead=0)
    run.do(run.open_group("full/0/0", group="full"))

    (waits,) = run.do_all([run.open_group("g/0/0")])
    opened = run.do(run.open_group("e/0/0", "e/1/0", group="e", num_samples="2:eval"))

    assert "1 groups are live, 1 are allowed" in str(waits)
    assert opened == [1, 1]
    assert run.client.hget(run.keys.groups, "e") == b"2:evaluating"
    assert run.client.hmget(run.keys.frontier, "live_groups", "opened_groups") == [b"1", b"1"]
    assert run.do(run.post_sealed("e/0/0", 1, b"seal")) == [b"OK"]
    assert run.counts() == {"accepted": 3, "open": 2, "sealed": 1}
    assert run.do(adopt_command(run.name, "e/1/0", writer="w")) == [1, 2]


@dataclass(frozen=True)
class Case:
    """A run at some moment."""

    batch_groups: int
    max_staleness: int
    max_open_groups: int
    stepped: int
    announced: int | None
    num_open: int
    num_decided: int
    planned: int
    num_revised: int


cases = st.builds(
    Case,
    batch_groups=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    max_open_groups=st.integers(0, 6),
    stepped=st.integers(0, 5),
    announced=st.none() | st.integers(0, 6),
    num_open=st.integers(0, 8),
    num_decided=st.integers(0, 30),
    planned=st.integers(0, 5),
    num_revised=st.integers(-10, 10),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases)
def test_groups_are_admitted_by_the_rule_of_the_pure_function(drive: Drive, case: Case) -> None:
    policy = {name: getattr(case, name) for name in ("max_staleness", "max_open_groups")}
    run = drive(batch_groups=case.batch_groups, max_planned_ahead=0, **policy)
    numbers: Any = {
        "stepped": case.stepped,
        "live_groups": case.num_open + case.num_decided,
        "open_groups": case.num_open,
        "planned": case.planned,
        "planned_groups": case.planned * case.batch_groups + case.num_revised,
    }
    if case.announced is not None:
        numbers["announced"] = case.announced
    run.client.hset(run.keys.frontier, mapping=numbers)
    most_live = most_live_groups(
        admitting_step(case.stepped, case.announced, max_staleness=case.max_staleness),
        batch_groups=case.batch_groups,
        max_staleness=case.max_staleness,
        num_revised=case.num_revised,
    )
    expected = capacity(
        most_live,
        num_decided=case.num_decided,
        num_open=case.num_open,
        max_open=case.max_open_groups,
    )

    said = credit(run.client, run.name)
    replies = run.do_all([run.open_group(group=f"g{i}") for i in range(expected + 1)])

    assert said.num_groups == expected
    assert (said.reason is None) == (expected > 0)
    assert replies[:-1] == [[]] * expected
    assert isinstance(replies[-1], RejectedError)


def test_attempt_follows_the_highest_known_one_of_its_sample(run: RunDriver) -> None:
    # Attempt 999 of a group of 1,024 samples was accepted. Its decision read a million of them.
    opened = run.do(run.open_group("g/0/0", "g/1/1", "g/1/2"))
    before = (run.ledger(), run.counts())

    for attempts, name, most in (
        (["g/0/2"], "2 of trajectory g/0/2", 1),
        (["g/1/0", "g/1/9"], "9 of trajectory g/1/9", 3),
    ):
        with pytest.raises(InvalidTurnError) as refused:
            run.do(run.open_group(*attempts))
        assert refused.value.field == "attempt"
        assert refused.value.message == (
            f"{name} is above {most}, the one after the highest known attempt of the sample"
        )
        assert (run.ledger(), run.counts()) == before

    run.client.zadd(run.keys.refills, {"g/0/4": 1})
    assert opened == [1, 1, 1]
    assert run.do(run.open_group("g/1/3", "g/0/1", "g/0/4", "g/0/5")) == [1, 1, 1, 1]
    # A writer may open an attempt again whose predecessors are lost.
    assert run.do(run.open_group("g/0/9", num_samples="2+")) == [1]


@pytest.mark.parametrize(("num_samples", "name", "most"), [(1024, "g", 3), (1024, "g" * 500, 0)])
def test_attempts_of_a_group_are_limited_by_its_size(
    run: RunDriver, num_samples: int, name: str, most: int
) -> None:
    opening = [f"{name}/0/{attempt}" for attempt in range(most + 1)]
    assert most_samples(name) // num_samples == most + 1
    assert run.do(run.open_group(*opening, group=name, num_samples=num_samples)) == [1] * (most + 1)

    beyond = run.open_group(f"{name}/0/{most + 1}", group=name, num_samples=f"{num_samples}+")
    with pytest.raises(InvalidTurnError, match=f"is above {most}, the highest of this group"):
        run.do(beyond)
    run.client.zadd(run.keys.refills, {f"{name}/0/{most + 1}": 1})
    assert run.do(beyond) == [1]


def test_group_too_large_for_its_name_is_refused_before_any_write(run: RunDriver) -> None:
    with pytest.raises(
        GroupTooLargeError, match=r"num_samples=1024 .* of 513 bytes .* limit of 524288"
    ):
        run.do(run.open_group(group="g" * 513, num_samples=1024))

    assert run.ledger() == {}
    assert run.events() == []
