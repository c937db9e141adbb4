"""Snapshots of a planner as records."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testkit import config, sealed, shape
from testkit.runs.folds import abandoned, awaiting, key, opened, snapshot_of
from turnstream.batching.fold.readiness import RunFold
from turnstream.errors import RecordError
from turnstream.records.encoding import SNAPSHOT, read_header, write_frame
from turnstream.records.snapshots import PlannerSnapshot, decode_snapshot, encode_snapshot
from turnstream.types import Purpose

GOLDEN = Path(__file__).parent / "golden"


def golden_snapshot() -> PlannerSnapshot:
    """A planner with an open, a ready and a dropped group, and an evaluation with a result."""
    fold = RunFold(config(2))
    for event_id, event in enumerate(
        (
            opened(3, group_id="a"),
            *(opened(1, group_id=name) for name in "bc"),
            opened(1, group_id="e", purpose=Purpose.EVAL),
            sealed("a", turn_versions=[[(None, 1), (4, 2)]], anchors=[7]),
            replace(awaiting(1), key=key(1, group_id="a")),
            sealed("b"),
            abandoned(0, group_id="c"),
            sealed("e", tags={"env": "maze"}, metrics={"turns": 2.0}),
        )
    ):
        fold.apply(f"{event_id}-0", event)
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


def test_snapshot_with_a_turn_left_out_has_a_format_of_its_own() -> None:
    unused = shape(2, 3, trained=0, is_left_out=True)
    fold = RunFold(config(2))
    fold.apply("0-0", opened(2, group_id="a"))
    fold.apply("1-0", sealed("a", turns=[unused, shape(2, 3, parent=0, shared=2)]))
    snapshot = replace(golden_snapshot(), fold=fold.state)

    record = encode_snapshot(snapshot)

    assert decode_snapshot(record) == snapshot
    assert content_of(record)["format"] == 4
    plain = encode_snapshot(golden_snapshot())
    assert content_of(plain)["format"] == 3
    assert "is_left_out" not in json.dumps(content_of(plain))


def content_of(record: bytes) -> dict[str, Any]:
    return json.loads(zlib.decompress(read_header(record, kind=SNAPSHOT)))


def record_with(content: dict[str, Any]) -> bytes:
    return write_frame(SNAPSHOT, zlib.compress(json.dumps(content).encode()))


def test_snapshot_holds_every_attribute_and_the_order_of_groups() -> None:
    # An attribute that is not part of FoldState would be lost at a takeover.
    fold = RunFold(config(2))
    assert vars(fold).keys() == {"_config", "state"}
    for name in "cab":
        fold.apply("1-0", opened(1, group_id=name))
    restored = decode_snapshot(encode_snapshot(snapshot_of(fold.state)))
    assert [*restored.fold.groups] == ["c", "a", "b"]


def test_snapshot_has_the_names_and_content_of_format_3() -> None:
    stored = json.loads((GOLDEN / "snapshot.json").read_text())

    assert content_of(encode_snapshot(golden_snapshot())) == stored
    assert decode_snapshot(record_with(stored)) == golden_snapshot()


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"format": 2}, "older .*format 2; this one reads format 4"),
        ({"format": 5}, "newer .*format 5; this one reads up to 4"),
        ({"planner": 3}, "no snapshot of a planner: TypeError"),
        ({"planner": {"step": 1}}, "no snapshot of a planner: KeyError"),
    ],
)
def test_snapshot_of_another_release_is_refused(other: dict[str, Any], named: str) -> None:
    content = {**content_of(encode_snapshot(golden_snapshot())), **other}

    with pytest.raises(RecordError, match=named):
        decode_snapshot(record_with(content))


def test_removed_decided_groups_leave_ready_and_open_ones() -> None:
    fold = RunFold(config(2))
    for name in ("ready", "dropped", "open"):
        fold.apply("1-0", opened(1, group_id=name))
    fold.apply("2-0", sealed("ready"))
    fold.apply("3-0", abandoned(0, group_id="dropped"))

    fold.remove_decided([*fold.state.decided])

    assert [group.group_id for group in fold.ready] == ["ready"]
    assert (fold.num_open_groups, fold.state.decided) == (1, {})
