"""A leader that is killed around a revision of the config: its successor plans the very same."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness.rig import CONFIG, Rig, config
from turnstream.batching.merge.plan import Manifest
from turnstream.records.events import decode_event
from turnstream.store import keys
from turnstream.store.revisions import read_revisions, revise_config
from turnstream.types import ConfigRevised, Event
from turnstream_server.bus.manifests import read_plan
from turnstream_server.embedded import EmbeddedServer

pytestmark = [pytest.mark.e2e, pytest.mark.grpc, pytest.mark.timeout(600)]

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
    """A store with groups for three steps, the second of which has another config.

    Attributes:
        folder: of the store's data.
        plan: what an undisturbed batcher makes of them.
    """

    folder: Path
    plan: list[Manifest]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """Groups that nobody has planned yet, with what an undisturbed batcher would make of them."""
    folder = tmp_path_factory.mktemp("revised")
    with EmbeddedServer(folder / "store") as server, Rig(folder, server) as rig:
        rig.join(rig.start_generator(groups=18))
        revise_config(rig.client, rig.run, REVISED, from_step=2)
    shutil.copytree(folder, folder / "copy")
    with (
        EmbeddedServer(folder / "copy/store") as server,
        Rig(folder / "copy", server) as rig,
    ):
        rig.start_batcher()
        rig.wait(lambda: rig.planned() == NUM_PLANNED, "the plan")
        plan = plan_of(rig)
    shutil.rmtree(folder / "copy")
    return Published(folder, plan)


@pytest.fixture
def copied(published: Published, tmp_path: Path, start_rig: Callable[..., Rig]) -> Rig:
    """A rig around a copy of the published store."""
    shutil.copytree(published.folder / "store", tmp_path / "store")
    return start_rig(config=CONFIG)


@pytest.mark.parametrize(
    "failpoint",
    ["revise.before", "revise.after", "plan.after_write", "plan.before_write@2"],
)
def test_a_batcher_killed_around_a_revision_is_followed_by_one_with_the_same_plan(
    copied: Rig, published: Published, failpoint: str
) -> None:
    copied.let_batcher_die(failpoint)
    partial = plan_of(copied)

    copied.start_batcher()
    copied.wait(lambda: copied.planned() == NUM_PLANNED, "the plan")

    assert partial == published.plan[: len(partial)]
    assert plan_of(copied) == published.plan
    assert [len(each.groups) for each in published.plan] == [4, 6, 6]
    assert [each.config_revision for each in published.plan] == [1, 2, 2]
    revised = [event for event in events(copied) if isinstance(event, ConfigRevised)]
    assert revised == [ConfigRevised(revision=2, step=2)]
    assert read_revisions(copied.client, copied.run).in_force == 2
    copied.ledger().check()


def plan_of(rig: Rig) -> list[Manifest]:
    """The batches, but for the event that a revision is: it has the time in its name."""
    stored = [read_plan(rig.client, rig.run, step + 1) for step in range(rig.planned())]
    return [
        dataclasses.replace(each.manifest, previous_hash="", last_event_id="")
        for each in stored
        if each is not None
    ]


def events(rig: Rig) -> list[Event]:
    """All that the run was told."""
    entries: Any = rig.client.xrange(keys.run_keys(rig.run).events)
    return [decode_event(fields[b"r"]) for _, fields in entries]
