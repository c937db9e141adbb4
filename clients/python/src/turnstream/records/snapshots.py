"""Snapshot of a planner as a record, from which its successor resumes: compressed JSON.

A golden file lists all names; a change of one needs another FORMAT.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from turnstream.batching.fold.members import FoldState
from turnstream.records.encoding import (
    SNAPSHOT,
    check_format,
    read_header,
    read_value,
    reading,
    to_plain,
    write_frame,
)

FORMAT: Final = 3
"""Format of the JSON; grows whenever an older release would misread it."""

LEFT_OUT_FORMAT: Final = 4
"""Format of a snapshot with turns that are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSnapshot:
    """Content of a planner, by the names under which it is stored.

    Attributes:
        position: id of the last folded event.
        step: the last plan whose groups the fold has taken; 0 before the first.
        versions: announced version -> the last step in its weights.
        lineage: lineage of the last announced version; "" before the first.
        config_revision: revision of the present config.
        revised_at: id of the event with this revision.
    """

    position: str
    step: int
    manifest_hash: str
    next_row_id: int
    fold: FoldState = field(default_factory=FoldState)
    versions: Mapping[int, int] = field(default_factory=dict[int, int])
    lineage: str = ""
    config_revision: int = 1
    revised_at: str = "0-0"


def encode_snapshot(snapshot: PlannerSnapshot) -> bytes:
    """Return the record of a snapshot."""
    text = json.dumps(to_plain(snapshot), separators=(",", ":"))
    # The quotes of a text inside JSON are escaped, so this is the field.
    number = LEFT_OUT_FORMAT if '"is_left_out":true' in text else FORMAT
    text = f'{{"format":{number},"planner":{text}}}'
    return write_frame(SNAPSHOT, zlib.compress(text.encode(), 1))


def decode_snapshot(record: bytes) -> PlannerSnapshot:
    """Return the snapshot of a record."""
    header = read_header(record, kind=SNAPSHOT)
    with reading("no snapshot of a planner"):
        content: Any = json.loads(zlib.decompress(header))
        check_format("snapshot", content["format"], newest=LEFT_OUT_FORMAT, oldest=FORMAT)
        return read_value(PlannerSnapshot, content["planner"])
