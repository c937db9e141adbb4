"""Faults of batchers: killed around every decision, plan and answer, and put to sleep.

Fault 13, and fault 14 in the last test.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness.history import History
from harness.rig import CONFIG, PATIENCE_S, Rig, config
from testkit.services.clusters import Cluster
from testkit.services.processes import frozen, is_frozen
from turnstream.batching.config import BatchingConfig, GroupFilter
from turnstream.batching.merge.plan import Manifest
from turnstream.records.events import decode_event
from turnstream.store.client import keys
from turnstream.store.run.configs import read_revisions, revise_config
from turnstream.store.run.runs import close_run
from turnstream.types import (
    BatchDue,
    ConfigRevised,
    DeadlineFired,
    Event,
    RefillGranted,
    RunFinished,
    TrajectoryAbandoned,
)
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.ledger.core.frontier import read_frontier
from turnstream_server.ledger.planning.announcements import await_replan, request_replan
from turnstream_server.ledger.planning.manifests import read_plan

pytestmark = [pytest.mark.e2e, pytest.mark.grpc, pytest.mark.timeout(600)]

PLAIN = config(group_filters=(GroupFilter(kind="zero_variance"),))
REVISED = config(
    estimator="dr_grpo",
    batch_groups=6,
    mini_batch_groups=3,
    max_tokens_per_micro_batch=128,
    group_deadline_s=2.0,
    deadline_policy="train_short",
)
NUM_PLANNED = CONFIG.max_planned_ahead + 1


class Published(NamedTuple):
    """A store in which groups wait to be planned.

    Attributes:
        folder: the store's data, and the history of its generator.
        config: first config of the run.
        is_revised: whether another config applies from step 2 on; otherwise one group is damaged.
        excused: trajectories of groups that the planner must drop.
        plan: batches that an undisturbed batcher plans.
    """

    folder: Path
    config: BatchingConfig
    is_revised: bool
    excused: set[str]
    plan: list[Manifest]


@pytest.fixture(scope="module")
def published(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Published:
    """Publish groups, and let an undisturbed batcher plan a copy of them."""
    is_revised = request.param == "revised"
    folder, excused = tmp_path_factory.mktemp("published"), set[str]()
    first = CONFIG if is_revised else PLAIN
    with EmbeddedServer(folder / "store") as server, Rig(folder, server, config=first) as rig:
        rig.join(rig.start_generator(groups=20))
        if is_revised:
            revise_config(rig.client, rig.run, REVISED, from_step=2)
        else:
            excused = _without_signal(rig.history())
            damaged = min(name for name in rig.history().acknowledged if name not in excused)
            payload = keys.trajectory_keys(rig.run, damaged)
            assert rig.client.xdel(payload.turns, "0-1") == 1
            excused |= rig.history().acknowledged_by_group[damaged.split("/")[0]]
    copy = folder / "copy"
    shutil.copytree(folder, copy)
    with EmbeddedServer(copy / "store") as server, Rig(copy, server, config=first) as rig:
        rig.start_batcher()
        rig.wait(lambda: rig.planned() == NUM_PLANNED, "the plan")
        plan = _plan(rig)
    shutil.rmtree(copy)
    return Published(folder, first, is_revised, excused, plan)


def _without_signal(history: History) -> set[str]:
    return {
        name
        for members in history.acknowledged_by_group.values()
        if len({history.seals[name][0]["reward"] for name in members}) == 1
        for name in members
    }


def _plan(rig: Rig) -> list[Manifest]:
    """Return the batches, and assert that each names the hash of the batch before."""
    found = [read_plan(rig.client, rig.run, step + 1) for step in range(rig.planned())]
    stored = [each for each in found if each is not None]
    assert len(stored) == rig.planned()
    for before, after in itertools.pairwise(stored):
        assert after.manifest.previous_hash == before.hash
    return [each.manifest for each in stored]


def _repeated(plan: Sequence[Manifest], *, is_revised: bool) -> list[Manifest]:
    """Return the part of the batches that every batcher derives alike.

    The event of a revision has the time of its batcher, so its id is left out, and later hashes.
    """
    if not is_revised:
        return [*plan]
    revised = [dataclasses.replace(each, last_event_id="") for each in plan[1:]]
    later = [dataclasses.replace(each, previous_hash="") for each in revised[1:]]
    return [*plan[:1], *revised[:1], *later]


@pytest.fixture
def copied(published: Published, tmp_path: Path, start_rig: Callable[..., Rig]) -> Rig:
    shutil.copytree(published.folder / "store", tmp_path / "store")
    shutil.copytree(published.folder / "history", tmp_path / "history")
    rig = start_rig(config=published.config)
    rig.excused = published.excused
    return rig


PLANNED_AT: dict[str, dict[str, int]] = {
    "plain": {
        **dict.fromkeys(("settle.before", "settle.after", "plan.before_check"), 0),
        **dict.fromkeys(("mark_dead.before", "mark_dead.after", "plan.before_write"), 0),
        "plan.after_write": 1,
        "plan.before_write@2": 2,
    },
    "revised": {
        **dict.fromkeys(("plan.after_write", "revise.before", "revise.after"), 1),
        "plan.before_write": 1,
    },
}
"""Failpoints in the order in which batchers reach them, each with the number of batches then."""


@pytest.mark.parametrize("published", PLANNED_AT, indirect=True)
def test_batcher_killed_while_planning_has_a_successor_with_the_same_plan(
    copied: Rig, published: Published
) -> None:
    # Each batcher continues the work of the one before, and dies at the next failpoint.
    planned_at = PLANNED_AT["revised" if published.is_revised else "plain"]
    partial: list[list[Manifest]] = []
    for failpoint in planned_at:
        copied.let_batcher_die(failpoint)
        partial.append(_plan(copied))

    copied.start_batcher()
    copied.wait(lambda: copied.planned() == NUM_PLANNED, "the plan")

    plan, is_revised = _plan(copied), published.is_revised
    assert [len(each) for each in partial] == [*planned_at.values()]
    assert partial == [plan[: len(each)] for each in partial]
    expected = _repeated(published.plan, is_revised=is_revised)
    assert _repeated(plan, is_revised=is_revised) == expected
    if is_revised:
        assert [len(each.groups) for each in published.plan] == [4, 6, 6]
        assert [each.config_revision for each in published.plan] == [1, 2, 2]
        entries: Any = copied.client.xrange(keys.run_keys(copied.run).events)
        events = {key.decode(): decode_event(fields[b"r"]) for key, fields in entries}
        revised = {key: each for key, each in events.items() if isinstance(each, ConfigRevised)}
        assert [*revised.values()] == [ConfigRevised(revision=2, step=2)]
        assert {each.last_event_id for each in plan[1:]} == revised.keys()
        assert read_revisions(copied.client, copied.run).in_force == 2
        copied.centered_from = 2
    copied.drain()


@pytest.mark.parametrize("failpoint", ["replan.before_write", "replan.after_write"])
def test_leader_killed_around_a_withdrawal_has_a_successor_that_completes_it(
    rig: Rig, failpoint: str
) -> None:
    rig.join(rig.start_generator(groups=12, samples=3))
    first = rig.start_batcher("first")
    rig.wait(lambda: rig.planned() == NUM_PLANNED, "the plan")
    first.kill()
    plan = read_plan(rig.client, rig.run, 1)
    assert plan is not None
    damaged = keys.trajectory_id(plan.manifest.groups[0].trajectories[0].key)
    Cluster(rig.server.url).damage(rig.run, damaged)

    request = request_replan(rig.client, rig.run)
    rig.let_batcher_die(failpoint)
    is_done = failpoint == "replan.after_write"
    assert read_frontier(rig.client, rig.run).planned == (0 if is_done else NUM_PLANNED)
    rig.start_batcher()
    done = await_replan(rig.client, rig.run, request, wait_s=PATIENCE_S)
    rig.excused = {damaged}
    rig.loses_plans = True
    rig.drain()

    assert done == f"steps 1 to {NUM_PLANNED}; damaged trajectories: 1"
    assert rig.counts()["committed"] == 12 * 3 - 1
    assert rig.counts()["dead"] == 1


def test_batcher_killed_while_serving_has_a_successor_that_serves_on(rig: Rig) -> None:
    # Before and after every script that a trainer's call runs, and in the middle of a transfer.
    rig.start_generator(groups=24)
    rig.start_ranks(1, checkpoint_every=1, timeout_s=PATIENCE_S)
    for failpoint in (
        *("session.before_start", "session.after_start", "get.after_header", "get.after_data"),
        *("stepped.before", "stepped.after", "committed.before", "committed.after"),
    ):
        rig.let_batcher_die(failpoint, name="batcher")
    rig.start_batcher()

    rig.wait_for_lines("committed", 6)

    assert len(rig.history().sessions) == 1  # the trainer only had to wait
    rig.drain()


def test_leader_that_sleeps_through_its_lease_is_refused_when_it_wakes(rig: Rig) -> None:
    # Fault 14: it sleeps with a checked plan that is not yet written.
    sleeper = rig.start_batcher("sleeper", failpoint="plan.before_write@2=stop")
    rig.start_generator(groups=24)
    rig.wait(lambda: is_frozen(sleeper.pid), "the leader's sleep")
    rig.start_batcher(lease_s=60.0)
    rig.start_ranks(1, checkpoint_every=2)
    rig.wait_for_lines("committed")

    with frozen(sleeper.pid):  # the end of the block wakes it
        pass
    log = sleeper.log_path
    rig.wait(lambda: "no longer leading" in log.read_text(), "the sleeper's refusal")

    assert rig.client.hget(keys.run_keys(rig.run).leader, "epoch") == b"2"
    rig.drain(target=rig.address("sleeper"))  # it still serves the other one's plans


LOST = "dead-0/1/0"
"""Its generator dies after the first turn; the other member is sealed by then."""

DECIDING = config(
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
    rig = start_rig(config=DECIDING)
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
