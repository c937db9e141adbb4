"""A trajectory is found by its name as people read it, and by the id that keys and columns have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from testkit import group, trajectory
from turnstream.errors import ConflictError
from turnstream.generator import Publisher
from turnstream_server.ledger.admin.dead_letters import DeadLetterNotFoundError
from turnstream_server.ledger.queries.trajectory_history import TrajectoryNotFoundError

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

# Two of these groups have names of which one is the other, encoded.
GROUPS = ("task-7#1", "a/b", "a%2Fb")


@pytest.fixture(scope="module")
def run(place: Any) -> str:
    """A run in which the reason of each trajectory is the name of its group."""
    run = place.create_run("names", batch_groups=4, mini_batch_groups=4)
    with Publisher(place.url, run) as publisher:
        for name in GROUPS:
            with publisher.group(name, 1) as opened:
                opened.trajectory(0).abandon(f"of {name}").result(10)
    return run


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        *(("task-7#1/0/0", "task-7#1"), ("task-7%231/0/0", "task-7#1")),
        *(("a/b/0/0", "a/b"), ("a%2Fb/0/0", "a%2Fb"), ("a%252Fb/0/0", "a%2Fb")),
    ],
)
def test_a_history_is_found_by_either_name_and_shows_the_readable_one(
    place: Any, run: str, typed: str, meant: str
) -> None:
    shown = place.type("ledger", run, typed)
    as_json = json.loads(place.type("ledger", run, typed, "--json"))

    assert f"{run}: {meant}/0/0" in shown
    assert as_json["reason"] == f"of {meant}"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("task-8%231/0/0", "'task-8#1/0/0'"),
        ("task-8#1/0/0", "'task-8#1/0/0'"),
        *(
            (name, f"{name}' is no trajectory")
            for name in ("a/b", "a/b/c", "/0/0", "a/0/x", f"{'a' * 600}/0/0")
        ),
    ],
)
def test_unknown_or_invalid_name_is_refused_with_the_reason(
    place: Any, run: str, typed: str, message: str
) -> None:
    with pytest.raises(TrajectoryNotFoundError, match=re.escape(message)):
        place.type("ledger", run, typed)
    with pytest.raises(DeadLetterNotFoundError, match=re.escape(message)):
        place.type("dead", "show", run, typed)


def test_dead_letter_is_shown_exported_and_discarded_by_either_name(
    place: Any, tmp_path: Path
) -> None:
    run = place.create_run("letters", batch_groups=2, mini_batch_groups=2)
    place.publish(run, group("d#1", *[trajectory(sample=n, reward=float(n)) for n in range(3)]))
    place.damage(run, "d%231/1/0")
    place.publish(run, group("f"))
    place.train(run)
    exported = tmp_path / "dead.json"

    listed = place.type("dead", "list", run)
    shown = place.type("dead", "show", run, "d#1/1/0")
    same = place.type("dead", "show", run, "d%231/1/0")
    place.type("dead", "export", run, "d#1/1/0", "--to", str(exported))
    discarded = place.type("dead", "discard", run, "d%231/1/0")

    assert "d#1/1/0" in listed
    assert f"{run}: d#1/1/0" in shown
    assert same == shown
    assert re.search(r"turn 0 +│ \d+ bytes: the checksum", shown)
    assert re.search(r"seal +│ \d+ bytes +│", shown)
    assert json.loads(exported.read_text())["name"] == "d%231/1/0"
    assert discarded == "1 discarded\n"
    with pytest.raises(ConflictError):
        place.type("dead", "discard", run, "f/0/0")
