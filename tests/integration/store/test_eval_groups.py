"""Groups that are opened to evaluate, script by script."""

from __future__ import annotations

import pytest

from testkit.run_driver import Drive, RunDriver
from turnstream.errors import ConflictError, EndOfRunError
from turnstream.store.run.leases import take_over_command
from turnstream.store.run.runs import pause_run

pytestmark = pytest.mark.redis


def test_an_evaluation_is_admitted_where_training_must_wait_and_counts_nowhere(
    drive: Drive,
) -> None:
    run = drive(batch_groups=1, max_staleness=0, max_planned_ahead=0)
    run.do(run.open_group("full/0/0", group="full"))

    (waits,) = run.do_all([run.open_group("g/0/0")])
    opened = run.do(run.open_group("e/0/0", group="e", num_samples="2:eval"))

    assert "1 groups are live, 1 are allowed" in str(waits)
    assert opened == [1]
    assert run.client.hget(run.keys.groups, "e") == b"2:evaluating"
    assert run.client.hmget(run.keys.frontier, "live_groups", "opened_groups") == [b"1", b"1"]
    assert run.counts() == {"accepted": 2, "open": 2}


def test_an_evaluation_is_not_admitted_into_a_closed_run(run: RunDriver) -> None:
    run.do(run.close())

    with pytest.raises(EndOfRunError):
        run.do(run.open_group("e/0/0", group="e", num_samples="2:eval"))


@pytest.mark.parametrize("purposes", [("2", "2:eval"), ("2:eval", "2")])
def test_a_group_cannot_change_its_purpose(run: RunDriver, purposes: tuple[str, str]) -> None:
    first, second = purposes
    run.do(run.open_group("e/0/0", group="e", num_samples=first))

    with pytest.raises(ConflictError, match="for training or for evaluation"):
        run.do(run.open_group("e/1/0", group="e", num_samples=second))


def test_evaluation_can_be_sealed_and_its_open_members_adopted(run: RunDriver) -> None:
    run.do(run.open_group("e/0/0", "e/1/0", group="e", num_samples="2:eval"))

    assert run.do(run.post_sealed("e/0/0", 1, b"seal")) == [b"OK"]
    assert run.counts() == {"accepted": 2, "open": 1, "sealed": 1}
    assert run.do(take_over_command(run.name, "e/1/0", writer="w")) == [1, 2]


def test_an_evaluation_begins_while_the_training_is_paused(run: RunDriver) -> None:
    pause_run(run.client, run.name, "the judge is down")

    (waits,) = run.do_all([run.open_group("g/0/0")])
    opened = run.do(run.open_group("e/0/0", group="e", num_samples="2:eval"))

    assert "the run is paused: the judge is down" in str(waits)
    assert opened == [1]
