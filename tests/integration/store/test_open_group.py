from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from turnstream.errors import (
    ConflictError,
    EndOfRunError,
    RejectedError,
    RunNotFoundError,
)
from turnstream.store.scripts import Command

pytestmark = pytest.mark.redis

Drive = Callable[..., Any]


def test_a_group_is_registered_once_and_each_sample_is_taken(
    client: redis.Redis, drive: Drive
) -> None:
    run = drive(client)

    first = run.do(run.open_group("g/0/0", "g/1/0"))
    again = run.do(run.open_group("g/0/0", "g/1/0"))

    assert first == again == [1, 1]
    assert run.events() == [b"opened g"]
    assert run.ledger() == {b"g/0/0": b"open:1:w", b"g/1/0": b"open:1:w"}
    assert run.counts() == {"accepted": 2, "open": 2}
    assert client.hget(run.keys.groups, "g") == b"2:open"
    assert client.hmget(run.keys.frontier, "live_groups", "opened_groups") == [b"1", b"1"]


def test_a_sample_belongs_to_the_writer_who_came_first(client: redis.Redis, drive: Drive) -> None:
    run = drive(client)
    run.do(run.open_group("g/0/0", writer="first:w"))

    mine = run.do(run.open_group("g/0/0", "g/1/0", writer="second"))

    assert mine == [b"CONFLICT g/0/0 is being written by first:w", 1]


def test_a_group_cannot_change_its_number_of_samples(client: redis.Redis, drive: Drive) -> None:
    run = drive(client)
    run.do(run.open_group("g/0/0", num_samples=2))

    with pytest.raises(ConflictError, match="opened with 2 samples, not 3"):
        run.do(run.open_group("g/1/0", num_samples=3))


def test_a_run_that_was_never_created_can_neither_be_opened_nor_closed(
    client: redis.Redis, drive_nothing: Drive
) -> None:
    run = drive_nothing(client)

    for command in (run.open_group("g/0/0"), run.close()):
        with pytest.raises(RunNotFoundError):
            run.do(command)


def test_a_new_group_waits_while_there_is_no_capacity(client: redis.Redis, drive: Drive) -> None:
    run = drive(client, batch_groups=1, max_staleness=1, max_planned_ahead=0)
    for group in ("a", "b"):
        run.do(run.open_group(group=group))

    with pytest.raises(
        RejectedError, match="2 groups are live, 2 are allowed after step 0"
    ) as told:
        run.do(run.open_group(group="c"))
    client.hset(run.keys.frontier, "stepped", 1)
    run.do(run.open_group(group="c"))

    assert told.value.retry_after_s is not None
    assert run.events() == [b"opened a", b"opened b", b"opened c"]


def test_further_samples_of_a_known_group_never_wait(client: redis.Redis, drive: Drive) -> None:
    run = drive(client, batch_groups=1, max_staleness=0, max_planned_ahead=0)
    run.do(run.open_group("g/0/0"))

    assert run.do(run.open_group("g/1/0", writer="other")) == [1]


def test_a_refusal_for_capacity_carries_the_newest_wake_id(
    client: redis.Redis, drive: Drive
) -> None:
    run = drive(client, batch_groups=1, max_staleness=0, max_planned_ahead=0)
    run.do(run.open_group())
    before = raw_refusal(client, run.open_group(group="b"))
    wake_id: Any = client.xadd(run.keys.wake, {"w": ""})

    after = raw_refusal(client, run.open_group(group="b"))

    assert before.split()[:2] == ["WAIT", "0-0"]
    assert after.split()[:2] == ["WAIT", wake_id.decode()]


def raw_refusal(client: redis.Redis, command: Command) -> str:
    with pytest.raises(redis.ResponseError) as refusal:
        client.execute_command(*command.words)
    return str(refusal.value)


def test_a_closed_run_takes_no_new_group_but_lets_old_ones_finish(
    client: redis.Redis, drive: Drive
) -> None:
    run = drive(client)
    run.do(run.open_group("g/0/0"))

    closed = [run.do(run.close()), run.do(run.close())]

    assert closed == [1, 0]
    assert run.events() == [b"opened g", b"closed"]
    assert client.xlen(run.keys.wake) == 1
    assert run.do(run.open_group("g/1/0")) == [1]
    with pytest.raises(EndOfRunError):
        run.do(run.open_group("h/0/0", group="h"))


def test_a_decided_group_takes_no_further_sample(client: redis.Redis, drive: Drive) -> None:
    run = drive(client)
    run.do(run.open_group("g/0/0"))
    client.hset(run.keys.groups, "g", "2:filtered")

    assert run.do(run.open_group("g/0/0", "g/1/0")) == [
        1,
        b"CONFLICT group g is already filtered",
    ]
