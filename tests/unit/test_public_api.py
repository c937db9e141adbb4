"""The page of the public API has every public name, and every call of a run and a step."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import turnstream
from turnstream import errors
from turnstream.generator import AsyncPublisher, Publisher
from turnstream.generator.api.trajectory_writers import AsyncTrajectoryWriter, TrajectoryWriter
from turnstream.run import Run
from turnstream.worker.observer import ObserverStream
from turnstream.worker.steps import Batches, Step
from turnstream_server.settings import Settings

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


DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("late-rewards", "evaluations", "weights", "retention")
CALLS: dict[str, Callable[..., Any]] = {
    "publisher.group": Publisher.group,
    "publisher.trajectory": Publisher.trajectory,
    "trajectory.append": TrajectoryWriter.append,
    "batches.announce_version": Batches.announce_version,
    "ObserverStream": ObserverStream.__init__,
}


def text(page: str) -> str:
    return (DOCS / f"{page}.md").read_text(encoding="utf-8")


def listed(page: str) -> list[tuple[list[str], str]]:
    """Return the names in the first cell, and the default, of every row of the settings."""
    section = text(page).partition("| setting | default |")[2].partition("\n\n")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines()[2:]]
    return [(re.findall(r"`([^`]+)`", cells[0]), cells[1].strip(" `")) for cells in rows]


def defaults_of(names: list[str]) -> list[object]:
    """Return the defaults of a variable, or of an argument of calls."""
    setting, *calls = names
    if setting.startswith("TURNSTREAM_"):
        return [Settings.model_fields[setting.removeprefix("TURNSTREAM_").lower()].default]
    return [inspect.signature(CALLS[call]).parameters[setting].default for call in calls]


@pytest.mark.parametrize("page", ["weights", "retention"])
def test_page_has_the_default_of_every_argument_and_variable(page: str) -> None:
    rows = listed(page)

    assert len(rows) >= 3
    for names, written in rows:
        for default in defaults_of(names):
            assert as_written(default, of=names[0]) == written, names


def as_written(default: object, *, of: str) -> str:
    """Return a default as Python, or nothing for a variable that is not set."""
    if default is None and of.startswith("TURNSTREAM_"):
        return ""
    value = default.value if isinstance(default, Enum) else default
    return repr(value).replace("'", '"')


@pytest.mark.parametrize("page", PAGES)
def test_page_names_errors_that_exist_and_a_command(page: str) -> None:
    names = set(re.findall(r"`(\w+Error)`", text(page)))

    assert len(names) >= 2
    assert [name for name in names if not hasattr(errors, name)] == []
    assert re.search(r"^turnstream \w+ ", text(page), re.MULTILINE)
    assert text(page).count("\n") <= 100
