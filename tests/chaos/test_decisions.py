"""Fault 13: batchers killed before and after each script that writes a decision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from harness.rig import Rig, config
from turnstream.records.events import decode_event
from turnstream.store.client import keys
from turnstream.store.run.runs import close_run
from turnstream.types import (
    BatchDue,
    DeadlineFired,
    Event,
    RefillGranted,
    RunFinished,
    TrajectoryAbandoned,
)
from turnstream_server.ledger.planning.manifests import read_plan

pytestmark = [pytest.mark.e2e, pytest.mark.grpc, pytest.mark.timeout(600)]

LOST = "dead-0/1/0"
"""Its generator dies after the first turn; the other member is sealed by then."""

CONFIG = config(
    batch_groups=2,
    mini_batch_groups=1,
    selection="in_order",
    deadline_policy="refill",
    max_refills=1,
    lease_s=1.0,
)


def test_batcher_killed_around_each_decision_has_a_successor_that_decides_alike(
    start_rig: Callable[..., Rig],
) -> None:
    # Choice, abandonment, refill and end are each decided once.
    rig = start_rig(config=CONFIG)
    rig.join(rig.start_generator("w", groups=4))
    _die_around(rig, "batch_due")
    _leave_open(rig)
    _die_around(rig, "abandon_lapsed")
    _die_around(rig, "grant_refill")
    assert _decisions(rig) == {BatchDue: 2, TrajectoryAbandoned: 1, RefillGranted: 1}
    plans = rig.plan_hashes()

    end = rig.start_helper()
    rig.wait(lambda: "dead-0/1/1" in rig.history().acknowledged, "the other attempt")
    end.touch()
    close_run(rig.client, rig.run)
    _die_around(rig, "finish_run")
    rig.start_batcher()
    rig.drain()

    assert plans.items() <= rig.plan_hashes().items()
    assert _planned(rig) == [["w-0", "w-1"], ["w-2", "w-3"], ["dead-0"]]
    once = {TrajectoryAbandoned: 1, RefillGranted: 1, RunFinished: 1}
    assert _decisions(rig) == {BatchDue: 3, **once}
    assert rig.counts() == {"accepted": 11, "committed": 10, "abandoned": 1}


def test_batcher_killed_around_a_deadline_has_a_successor_that_fires_it_once(
    start_rig: Callable[..., Rig],
) -> None:
    rig = start_rig(config=config(group_deadline_s=0.5, deadline_policy="drop", lease_s=60.0))
    _leave_open(rig)

    _die_around(rig, "fire_deadlines")
    rig.start_batcher()
    rig.wait(lambda: rig.counts().get("open", 0) == 0, "the decision")

    rig.drain()
    assert _decisions(rig) == {DeadlineFired: 1, RunFinished: 1}
    assert rig.entry("dead-0/0/0").startswith("incomplete:")
    assert "its deadline passed" in rig.entry("dead-0/0/0")
    assert rig.planned() == 0


def _die_around(rig: Rig, script: str) -> None:
    for place in ("before", "after"):
        rig.let_batcher_die(f"{script}.{place}")


def _leave_open(rig: Rig) -> None:
    rig.start_generator("dead", groups=1, hang_in=LOST)
    rig.wait_for_lines("hanging")
    rig.kill_generator("dead")


def _decisions(rig: Rig) -> Counter[type[Event]]:
    entries: Any = rig.client.xrange(keys.run_keys(rig.run).events)
    events = [decode_event(fields[b"r"]) for _, fields in entries]
    kinds = (BatchDue, DeadlineFired, RefillGranted, RunFinished, TrajectoryAbandoned)
    return Counter(type(event) for event in events if isinstance(event, kinds))


def _planned(rig: Rig) -> list[list[str]]:
    plans = [read_plan(rig.client, rig.run, step + 1) for step in range(rig.planned())]
    return [[group.group_id for group in plan.manifest.groups] for plan in plans if plan]
