"""What generators are told of how many groups may start now."""

from __future__ import annotations

import pytest
import redis

from testkit.run_driver import Drive, RunDriver
from turnstream.errors import RunNotFoundError
from turnstream.store.run.credits import CreditReason, credit
from turnstream.store.run.runs import pause_run, resume_run

pytestmark = pytest.mark.redis


def test_new_run_has_its_whole_credit(drive: Drive) -> None:
    run = drive(batch_groups=2, max_staleness=2)

    found = credit(run.client, run.name)

    assert (found.num_groups, found.most, found.stepped, found.reason) == (6, 6, 0, None)
    assert found.sentence == "6 groups may start: 0 of 6 are live after step 0"


def test_run_too_far_ahead_of_its_trainer_has_no_credit(drive: Drive) -> None:
    run = drive(batch_groups=1, max_staleness=1)
    run.do_all([run.open_group(group=name) for name in "ab"])

    found = credit(run.client, run.name)

    assert (found.num_groups, found.most) == (0, 2)
    assert found.reason is CreditReason.STALENESS
    assert found.sentence == "2 groups are live, 2 are allowed after step 0"


def test_run_with_its_most_open_groups_has_no_credit(drive: Drive) -> None:
    run = drive(batch_groups=8, max_open_groups=2)
    run.do(run.open_group(group="a"))

    before = credit(run.client, run.name)
    run.do(run.open_group(group="b"))
    after = credit(run.client, run.name)

    assert (before.num_groups, before.most, before.reason) == (1, 2, None)
    assert (after.num_groups, after.most, after.num_open) == (0, 2, 2)
    assert after.reason is CreditReason.OPEN_GROUPS
    assert after.sentence == "2 groups are open, max_open_groups is 2"


def test_a_closed_run_gives_none_whatever_is_free(run: RunDriver) -> None:
    run.do(run.close())

    found = credit(run.client, run.name)

    assert (found.num_groups, found.reason) == (0, CreditReason.CLOSED)


def test_credit_of_an_unknown_run_is_refused(client: redis.Redis) -> None:
    with pytest.raises(RunNotFoundError):
        credit(client, "no such run")


@pytest.mark.parametrize(
    ("reason", "sentence"), [("", "the run is paused"), ("disk", "the run is paused: disk")]
)
def test_a_paused_run_gives_none_and_says_why(run: RunDriver, reason: str, sentence: str) -> None:
    pause_run(run.client, run.name, reason)

    found = credit(run.client, run.name)
    resume_run(run.client, run.name)

    assert (found.num_groups, found.reason) == (0, CreditReason.PAUSED)
    assert found.sentence == sentence
    assert credit(run.client, run.name).reason is None
