"""Snapshots of a planner as records; `test_readiness_machine` resumes from them."""

from __future__ import annotations

import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any, cast

import pytest

from testkit import config, sealed
from testkit.folds import snapshot_of
from turnstream.batching.fold.members import FoldState
from turnstream.batching.fold.readiness import RunFold
from turnstream.errors import RecordError
from turnstream.records.framing import SNAPSHOT, read_header, write_frame
from turnstream.records.snapshots import (
    FORMAT,
    OBJECTS,
    PlannerSnapshot,
    decode_snapshot,
    encode_snapshot,
)
from turnstream.types import GroupOpened, Purpose, TrajectoryAbandoned, TrajectoryKey

GOLDEN = Path(__file__).parent / "golden"


def golden_snapshot() -> PlannerSnapshot:
    """A planner with an open, a ready and a dropped group, and an evaluation with a result."""
    fold = RunFold(config(2))
    for name, purpose in (("a", "train"), ("b", "train"), ("c", "train"), ("e", "eval")):
        opened = GroupOpened(
            group_id=name, prompt_uid="p", num_samples=1 + (name == "a"), purpose=Purpose(purpose)
        )
        fold.apply("1-0", opened)
    fold.apply("2-0", sealed("a"))
    fold.apply("3-0", sealed("b"))
    fold.apply("4-0", TrajectoryAbandoned(key=TrajectoryKey("c", 0), reason=""))
    fold.apply("5-0", sealed("e"))
    return PlannerSnapshot(
        position="5-0",
        step=3,
        manifest_hash="ab",
        next_row_id=7,
        fold=fold.state,
        versions={1: 0, 2: 3},
        lineage="main",
        config_revision=2,
        revised_at="1-0",
    )


def content_of(record: bytes) -> dict[str, Any]:
    return json.loads(zlib.decompress(read_header(record, kind=SNAPSHOT)))


def record_with(content: dict[str, Any]) -> bytes:
    return write_frame(SNAPSHOT, zlib.compress(json.dumps(content).encode()))


def test_snapshot_holds_every_attribute_of_the_fold() -> None:
    # An attribute that is not part of FoldState would be lost at a takeover.
    assert vars(RunFold(config(2))).keys() == {"_config", "state"}


def test_object_without_a_stored_name_is_refused() -> None:
    strange: Any = FoldState(groups=cast("Any", config(2)))

    with pytest.raises(TypeError, match="cannot hold a BatchingConfig"):
        encode_snapshot(snapshot_of(strange))


def test_stored_names_are_those_of_format_2() -> None:
    names = {
        name: [each.name for each in dataclasses.fields(kind)] for name, kind in OBJECTS.items()
    }

    assert {"format": FORMAT, **names} == json.loads((GOLDEN / "snapshot_names.json").read_text())


def test_snapshot_has_the_content_of_format_2() -> None:
    stored = json.loads((GOLDEN / "snapshot.json").read_text())

    assert content_of(encode_snapshot(golden_snapshot())) == stored
    assert decode_snapshot(record_with(stored)) == golden_snapshot()


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"format": 1}, r"older .*format 1; this one reads format 2"),
        ({"format": 3}, r"newer .*format 3; this one reads up to 2"),
        ({"planner": ["o", "planner", {"mood": 1}]}, "newer .* the field of planner 'mood'"),
        ({"planner": ["o", "mood", {}]}, "newer .* the object 'mood'"),
        ({"planner": ["m", 1]}, "newer .* the kind of value 'm'"),
        ({"planner": 3}, "no snapshot of a planner, but a int"),
        ({"planner": ["o", "planner", 3]}, "no snapshot of a planner: AttributeError"),
    ],
)
def test_snapshot_of_another_release_is_refused(other: dict[str, Any], named: str) -> None:
    content = {**content_of(encode_snapshot(golden_snapshot())), **other}

    with pytest.raises(RecordError, match=named):
        decode_snapshot(record_with(content))


def test_forget_keeps_ready_and_open_groups() -> None:
    fold = RunFold(config(2))
    for name in ("ready", "dropped", "open"):
        fold.apply("1-0", GroupOpened(group_id=name, prompt_uid="", num_samples=1))
    fold.apply("2-0", sealed("ready"))
    fold.apply("3-0", TrajectoryAbandoned(key=TrajectoryKey("dropped", 0), reason=""))

    fold.remove_decided([*fold.state.decided])

    assert [group.group_id for group in fold.ready] == ["ready"]
    assert (fold.num_open_groups, fold.state.decided) == (1, {})
