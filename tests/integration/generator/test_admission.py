from __future__ import annotations

import pytest

from testkit import group, wait_until
from testkit.stores import Store
from turnstream.errors import EndOfRunError, GroupTooLargeError
from turnstream.generator import Publisher
from turnstream.store.run.runs import close_run

pytestmark = pytest.mark.redis

ONE_GROUP = {"batch_groups": 1, "max_staleness": 0, "max_planned_ahead": 0}


def is_waiting(publisher: Publisher, num_groups: int = 1) -> None:
    wait_until(lambda: publisher.statistics().num_waits == num_groups, describe="a refused group")


def test_groups_are_admitted_in_the_order_of_their_requests(store: Store) -> None:
    run = store.new_run(**ONE_GROUP)

    with Publisher(store.url, run) as publisher:
        publisher.publish(group("g0")).result(10)
        receipts = [publisher.publish(group(f"g{number}")) for number in range(1, 5)]
        is_waiting(publisher, num_groups=4)
        for step, receipt in enumerate(receipts, start=1):
            store.read(run).frees_capacity(stepped=step)
            receipt.result(10)

    opened = [event.group_id for event in store.read(run).events() if hasattr(event, "group_id")]
    assert opened == [f"g{number}" for number in range(5)]


def test_closing_the_run_refuses_waiting_groups(store: Store) -> None:
    run = store.new_run(**ONE_GROUP)

    with Publisher(store.url, run) as publisher:
        publisher.publish(group("a")).result(10)
        receipt = publisher.publish(group("b"))
        is_waiting(publisher)
        close_run(store.client, run)
        with pytest.raises(EndOfRunError):
            receipt.result(10)

    assert store.read(run).counts() == {"accepted": 2, "sealed": 2}


def test_a_group_that_waits_starts_after_the_server_was_restarted(own_store: Store) -> None:
    run = own_store.new_run(**ONE_GROUP)

    with Publisher(own_store.url, run) as publisher:
        publisher.publish(group("a")).result(10)
        receipt = publisher.publish(group("b"))
        is_waiting(publisher)
        own_store.restart()
        own_store.read(run).frees_capacity(stepped=1)
        receipt.result(10)

    assert own_store.read(run).counts() == {"accepted": 4, "sealed": 4}


def test_an_evaluation_above_the_budget_is_refused_at_once(store: Store) -> None:
    run = store.new_run(batch_groups=1, max_bytes=100_000)

    with (
        Publisher(store.url, run, admission_timeout_s=600) as publisher,
        pytest.raises(GroupTooLargeError, match=r"group eval-1 needs .* max_bytes is 100000"),
        publisher.group("eval-1", num_samples=2, purpose="eval"),
    ):
        pass
