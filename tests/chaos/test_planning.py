"""Faults of batchers: killed at every step of planning and serving, and two that lead at once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness.history import History
from harness.rig import PATIENCE_S, Rig, config
from harness.sleepers import asleep, is_asleep
from turnstream.store import keys
from turnstream_server.embedded import EmbeddedServer

pytestmark = [pytest.mark.e2e, pytest.mark.grpc, pytest.mark.timeout(600)]

CONFIG = config(drop_zero_variance=True)
NUM_PLANNED = CONFIG.max_planned_ahead + 1


class Published(NamedTuple):
    """A store in which groups wait to be planned, one of them damaged.

    Attributes:
        folder: of the store's data, and of the history of its generator.
        excused: trajectories of groups that the planner must drop.
        plan_hashes: of the batches that an undisturbed batcher plans.
    """

    folder: Path
    excused: set[str]
    plan_hashes: dict[int, str]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """Groups that nobody has planned yet, with what an undisturbed batcher would make of them."""
    folder = tmp_path_factory.mktemp("published")
    with EmbeddedServer(folder / "store") as server, Rig(folder, server, config=CONFIG) as rig:
        rig.join(rig.start_generator(groups=20))
        excused = _without_signal(rig.history())
        damaged = min(name for name in rig.history().acknowledged if name not in excused)
        payload = keys.trajectory_keys(rig.run, damaged)
        assert rig.client.xdel(payload.turns, "0-1") == 1
        group = damaged.split("/")[0]
        excused |= rig.history().acknowledged_by_group[group]
    shutil.copytree(folder, folder / "copy")
    with (
        EmbeddedServer(folder / "copy/store") as server,
        Rig(folder / "copy", server, config=CONFIG) as rig,
    ):
        rig.start_batcher()
        rig.wait(lambda: rig.planned() == NUM_PLANNED, "the plan")
        hashes = rig.plan_hashes()
    shutil.rmtree(folder / "copy")
    return Published(folder, excused, hashes)


def _without_signal(history: History) -> set[str]:
    """Trajectories of groups whose rewards are all equal."""
    return {
        name
        for members in history.acknowledged_by_group.values()
        if len({history.seals[name][0]["reward"] for name in members}) == 1
        for name in members
    }


@pytest.fixture
def copied(published: Published, tmp_path: Path, start_rig: Callable[..., Rig]) -> Rig:
    """A rig around a copy of the published store."""
    shutil.copytree(published.folder / "store", tmp_path / "store")
    shutil.copytree(published.folder / "history", tmp_path / "history")
    rig = start_rig(config=CONFIG)
    rig.excused = published.excused
    return rig


@pytest.mark.parametrize(
    "failpoint",
    [
        "plan.before_check",
        "plan.before_write",
        "plan.before_write@2",
        "plan.after_write",
        "plan.after_write@2",
        "settle.before",
        "settle.after",
        "mark_dead.before",
        "mark_dead.after",
    ],
)
def test_a_batcher_killed_at_any_step_of_planning_is_followed_by_one_with_the_same_plan(
    copied: Rig, published: Published, failpoint: str
) -> None:
    # Fault 13
    copied.let_batcher_die(failpoint)
    partial = copied.plan_hashes()

    copied.start_batcher()
    copied.wait(lambda: copied.planned() == NUM_PLANNED, "the plan")

    assert partial.items() <= published.plan_hashes.items()
    assert copied.plan_hashes() == published.plan_hashes
    copied.drain()


def test_a_batcher_killed_while_it_serves_is_followed_by_one_that_goes_on(rig: Rig) -> None:
    # Fault 13, on the trainer's side: before and after every script that a trainer's call runs,
    # and in the middle of a transfer.
    rig.start_generator(groups=24)
    ranks = rig.start_ranks(1, checkpoint_every=1, timeout_s=PATIENCE_S)
    for failpoint in (
        "session.before_start",
        "session.after_start",
        "get.after_header",
        "get.after_data",
        "stepped.before",
        "stepped.after",
        "committed.before",
        "committed.after",
    ):
        rig.let_batcher_die(failpoint, name="batcher")
    rig.start_batcher()

    rig.wait_for_lines("committed", 6)

    assert len(rig.history().sessions) == 1  # the trainer has noticed nothing but the time
    for rank in ranks:
        rank.kill()
    rig.drain()


def test_a_leader_that_sleeps_through_its_lease_is_refused_when_it_wakes(rig: Rig) -> None:
    # Fault 14: it sleeps with a checked plan in its hands. Its successor does not lose the lease.
    sleeper = rig.start_batcher("sleeper", failpoint="plan.before_write@2=stop").service
    rig.start_generator(groups=24)
    rig.wait(lambda: is_asleep(sleeper.pid), "the leader's sleep")
    rig.start_batcher(lease_s=60.0)
    ranks = rig.start_ranks(1, checkpoint_every=2)
    rig.wait_for_lines("committed")

    with asleep(sleeper.pid):  # it was; this wakes it
        pass
    log = sleeper.log_path
    rig.wait(lambda: "no longer leading" in log.read_text(), "the sleeper's refusal")

    assert _leader(rig)["epoch"] == b"2"
    for rank in ranks:
        rank.kill()
    rig.drain(target=rig.address("sleeper"))  # it still serves what the other one planned


def _leader(rig: Rig) -> dict[str, bytes]:
    found: Any = rig.client.hgetall(keys.run_keys(rig.run).leader)
    return {name.decode(): value for name, value in found.items()}
