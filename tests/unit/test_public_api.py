"""The page of the public API has every public name, and every call of a run and a step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import turnstream
from turnstream.generator import AsyncPublisher, Publisher
from turnstream.generator.api.trajectory_writers import AsyncTrajectoryWriter, TrajectoryWriter
from turnstream.run import Run
from turnstream.worker.steps import Batches, Step

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def public(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_page_lists_every_public_name_and_no_other() -> None:
    names = [row.split("|")[1] for row in PAGE.splitlines() if row.startswith("| `turnstream.")]
    listed = {name for each in names for name in re.findall(r"turnstream\.(\w+)", each)}

    assert listed == set(turnstream.__all__)
    assert len(turnstream.__all__) < 30


@pytest.mark.parametrize(
    ("kind", "prefix", "unlisted"),
    [
        (Run, "run", set()),
        (Step, "step", {"is_done"}),
        (Batches, "batches", {"close", "config", "newest_version", "statistics"}),
    ],
)
def test_page_lists_the_calls_of_a_run_and_its_steps(
    kind: type, prefix: str, unlisted: set[str]
) -> None:
    listed = set(re.findall(rf"`{prefix}\.(\w+)", PAGE))
    attributes = {"number", "num_mini_batches"} if kind is Step else set[str]()

    assert public(kind) - unlisted == listed - attributes - (
        {"batches"} if kind is Batches else set()
    )


@pytest.mark.parametrize(
    ("kinds", "prefix"),
    [
        ((Publisher, AsyncPublisher), "publisher"),
        ((TrajectoryWriter, AsyncTrajectoryWriter), "trajectory"),
    ],
)
def test_page_lists_the_calls_of_publishers_and_trajectories(
    kinds: tuple[type, ...], prefix: str
) -> None:
    listed = set(re.findall(rf"`{prefix}\.(\w+)", PAGE))

    for kind in kinds:
        assert {name for name in dir(kind) if not name.startswith("_")} == listed
