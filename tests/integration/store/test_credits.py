"""The number of groups that may start now, and the reason if none may."""

from __future__ import annotations

import pytest

from testkit.runs.run_driver import Drive, RunDriver
from turnstream.errors import RunNotFoundError
from turnstream.store.run.credits import CreditReason, credit
from turnstream.store.run.runs import pause_run, resume_run

pytestmark = pytest.mark.redis


def test_credit_falls_with_live_groups_to_the_limit_of_staleness(drive: Drive) -> None:
    run = drive(batch_groups=1, max_staleness=1)

    new = credit(run.client, run.name)
    run.do_all([run.open_group(group=name) for name in "ab"])
    ahead = credit(run.client, run.name)

    assert (new.num_groups, new.most, new.reason) == (2, 2, None)
    assert new.sentence == "2 groups may start: 0 of 2 are live after step 0"
    assert (ahead.num_groups, ahead.most, ahead.reason) == (0, 2, CreditReason.STALENESS)
    assert ahead.sentence == "2 groups are live, 2 are allowed after step 0"


def test_run_with_its_most_open_groups_has_no_credit(drive: Drive) -> None:
    run = drive(batch_groups=8, max_open_groups=2)
    run.do(run.open_group(group="a"))

    before = credit(run.client, run.name)
    run.do(run.open_group(group="b"))
    after = credit(run.client, run.name)

    assert (before.num_groups, before.reason) == (1, None)
    assert (after.num_groups, after.reason) == (0, CreditReason.OPEN_GROUPS)
    assert after.sentence == "2 groups are open, max_open_groups is 2"
    with pytest.raises(RunNotFoundError):
        credit(run.client, "no such run")


@pytest.mark.parametrize(
    ("why", "sentence"), [("", "the run is paused"), ("disk", "the run is paused: disk")]
)
def test_paused_or_closed_run_has_no_credit(run: RunDriver, why: str, sentence: str) -> None:
    pause_run(run.client, run.name, why)
    paused = credit(run.client, run.name)
    resume_run(run.client, run.name)
    resumed = credit(run.client, run.name)
    run.do(run.close())
    closed = credit(run.client, run.name)

    assert (paused.num_groups, paused.reason) == (0, CreditReason.PAUSED)
    assert paused.sentence == sentence
    assert resumed.reason is None
    assert (closed.num_groups, closed.reason) == (0, CreditReason.CLOSED)
