from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis

from testkit import group, ids, trajectory, turn, wait_until
from turnstream.errors import EndOfRunError, GroupTooLargeError, NotReadyError
from turnstream.generator import Publisher
from turnstream.generator.transport import sender
from turnstream.store.run.runs import close_run
from turnstream_server.embedded import EmbeddedServer

pytestmark = pytest.mark.redis

NewRun = Callable[..., str]
Read = Callable[[redis.Redis, str], Any]
ONE_GROUP = {"batch_groups": 1, "max_staleness": 0, "max_planned_ahead": 0}


def is_waiting(publisher: Publisher, num_groups: int = 1) -> None:
    wait_until(lambda: publisher.statistics().num_waits == num_groups, describe="a refused group")


def num_script_calls(client: redis.Redis) -> int:
    stats: Any = client.info("commandstats")
    return stats["cmdstat_evalsha"]["calls"]


def test_a_group_waits_for_capacity_and_starts_when_it_is_freed(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client, **ONE_GROUP)

    with Publisher(server.url, run) as publisher:
        publisher.publish(group("a")).result(10)
        receipt = publisher.publish(group("b"))
        is_waiting(publisher)
        was_done = receipt.is_done
        read(client, run).frees_capacity(stepped=1)
        receipt.result(10)
        statistics = publisher.statistics()

    assert not was_done
    assert (statistics.num_waits, statistics.num_retries) == (1, 0)
    assert statistics.wait_s > 0
    assert read(client, run).counts() == {"accepted": 4, "sealed": 4}


def test_waiting_asks_again_only_when_capacity_may_be_free(
    server: EmbeddedServer,
    client: redis.Redis,
    new_run: NewRun,
    read: Read,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = new_run(client, **ONE_GROUP)
    monkeypatch.setattr(sender, "ASK_AGAIN_S", 600.0)  # of its own accord

    with Publisher(server.url, run) as publisher:
        publisher.publish(group("a")).result(10)
        waiting = publisher.publish(group("b"))
        is_waiting(publisher)
        wait_until(lambda: num_blocked(client) == 1, describe="the blocked read")
        num_calls = num_script_calls(client)
        read(client, run).frees_capacity(stepped=0)  # it was for somebody else
        wait_until(lambda: num_script_calls(client) == num_calls + 1, describe="the second try")
        wait_until(lambda: num_blocked(client) == 1, describe="the blocked read")
        num_calls_after = num_script_calls(client)
        read(client, run).frees_capacity(stepped=1)
        waiting.result(10)

    assert num_calls_after == num_calls + 1


def num_blocked(client: redis.Redis) -> int:
    clients: Any = client.info("clients")
    return clients["blocked_clients"]


def test_entering_a_group_blocks_until_there_is_leave(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client, **ONE_GROUP)
    entered = threading.Event()

    def generate() -> None:
        with publisher.group("b", 1) as visit, visit.trajectory(0) as episode:
            entered.set()
            episode.append(ids("ab"), ids("c"))
            episode.seal(1.0)

    with Publisher(server.url, run) as publisher:
        publisher.publish(group("a")).result(10)
        generator = threading.Thread(target=generate, daemon=True)
        generator.start()
        is_waiting(publisher)
        was_entered = entered.is_set()
        read(client, run).frees_capacity(stepped=1)
        generator.join(10)

    assert not was_entered
    assert read(client, run).states()["b/0/0"] == "sealed"


def test_a_group_that_waits_holds_up_no_trajectory_of_a_known_one(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client, **ONE_GROUP)

    with Publisher(server.url, run) as publisher:
        known = publisher.trajectory("a", 0, num_samples=2)
        known.append(ids("ab"), ids("c")).result(10)
        receipt = publisher.publish(group("b"))
        is_waiting(publisher)
        known.append(ids("abc"), ids("d"))
        known.seal(1.0)
        other = publisher.trajectory("a", 1, num_samples=2)
        other.append(ids("ab"), ids("c"))
        other.seal(1.0)
        read(client, run).frees_capacity(stepped=1)
        receipt.result(10)

    assert read(client, run).counts() == {"accepted": 4, "sealed": 4}


def test_a_publisher_full_of_waiting_groups_still_takes_turns_of_known_ones(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client, **ONE_GROUP)

    with Publisher(server.url, run, max_inflight_bytes=1000) as publisher:
        known = publisher.trajectory("a", 0, num_samples=1)
        known.append(ids("ab"), ids("c")).result(10)
        publisher.publish(group("b", trajectory(turn("x" * 240, "Y"))))
        is_waiting(publisher)
        known.append(ids("a" * 100), ids("b" * 100))  # the step that frees capacity may need it
        known.seal(1.0)
        read(client, run).frees_capacity(stepped=1)

    assert read(client, run).counts() == {"accepted": 2, "sealed": 2}


def test_groups_start_in_the_order_in_which_they_asked(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client, **ONE_GROUP)

    with Publisher(server.url, run) as publisher:
        publisher.publish(group("g0")).result(10)
        receipts = [publisher.publish(group(f"g{number}")) for number in range(1, 5)]
        is_waiting(publisher, num_groups=4)
        for step, receipt in enumerate(receipts, start=1):
            read(client, run).frees_capacity(stepped=step)
            receipt.result(10)

    opened = [event.group_id for event in read(client, run).events() if hasattr(event, "group_id")]
    assert opened == [f"g{number}" for number in range(5)]


def test_closing_the_run_turns_those_who_wait_away(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client, **ONE_GROUP)

    with Publisher(server.url, run) as publisher:
        publisher.publish(group("a")).result(10)
        receipt = publisher.publish(group("b"))
        is_waiting(publisher)
        close_run(client, run)
        with pytest.raises(EndOfRunError):
            receipt.result(10)

    assert read(client, run).counts() == {"accepted": 2, "sealed": 2}


def test_a_wait_for_leave_ends_by_its_deadline_with_the_reason(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client, **ONE_GROUP)

    with Publisher(server.url, run, admission_timeout_s=0.1) as publisher:
        publisher.publish(group("a")).result(10)
        with pytest.raises(NotReadyError, match=r"within 0\.1 s: 1 groups are live, 1 are allowed"):
            publisher.publish(group("b")).result(10)
        with (
            pytest.raises(NotReadyError, match="group c: no leave"),
            publisher.group("c", 2),
        ):
            pass
        read(client, run).frees_capacity(stepped=1)
        publisher.publish(group("d")).result(10)

    assert read(client, run).counts() == {"accepted": 4, "sealed": 4}


def test_a_group_that_waits_starts_after_the_server_was_restarted(
    own_server: EmbeddedServer, own_client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(own_client, **ONE_GROUP)

    with Publisher(own_server.url, run) as publisher:
        publisher.publish(group("a")).result(10)
        receipt = publisher.publish(group("b"))
        is_waiting(publisher)
        own_server.kill()
        own_server.restart()
        read(own_client, run).frees_capacity(stepped=1)
        receipt.result(10)

    assert read(own_client, run).counts() == {"accepted": 4, "sealed": 4}


def test_closing_a_publisher_that_waits_withdraws_the_group(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun, read: Read
) -> None:
    run = new_run(client, **ONE_GROUP)
    publisher = Publisher(server.url, run)
    publisher.publish(group("a")).result(10)
    receipt = publisher.publish(group("b"))
    is_waiting(publisher)

    with pytest.raises(NotReadyError):
        publisher.close(timeout_s=0.05)

    assert receipt.is_done
    assert read(client, run).counts() == {"accepted": 2, "sealed": 2}


def test_an_evaluation_above_the_budget_is_refused_at_once(
    server: EmbeddedServer, client: redis.Redis, new_run: NewRun
) -> None:
    run = new_run(client, batch_groups=1, max_bytes=100_000)

    with (
        Publisher(server.url, run, admission_timeout_s=600) as publisher,
        pytest.raises(GroupTooLargeError, match=r"group eval-1 needs .* max_bytes is 100000"),
        publisher.group("eval-1", num_samples=2, purpose="eval"),
    ):
        pass
