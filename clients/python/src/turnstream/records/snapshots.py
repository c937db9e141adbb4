"""Snapshot of a planner as a record, from which its successor resumes.

The content is compressed JSON. Values are written with their kinds, and objects with the names of
their class and of their public fields. Examples::

    {"g": (1, None)}       ["d", ["g", ["t", 1, null]]]
    TrajectoryKey("g", 2)  ["k", "g", 2, 0]
    an event               ["e", its record in base64]
    ReadyGroup(...)        ["o", "ready_group", {"group_id": "g", ...}]

A golden file lists all names; a change of one needs another FORMAT.
A reader refuses names that it does not know.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, TypeVar, cast, get_args

from turnstream.batching.fold.decisions import ReadyGroup
from turnstream.batching.fold.evals import EvalResults
from turnstream.batching.fold.members import FoldState, GroupMembers
from turnstream.errors import CorruptRecordError, UnknownFormatError
from turnstream.records.events import decode_event, encode_event
from turnstream.records.framing import SNAPSHOT, check_format, read_header, write_frame
from turnstream.records.values import reading
from turnstream.types import (
    EvalResult,
    Event,
    Figures,
    MetricStatistics,
    Spread,
    TagStatistics,
    TrajectoryKey,
    ValueStatistics,
)

FORMAT: Final = 2
"""Format of the JSON; grows whenever an older release would misread it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSnapshot:
    """Content of a planner, by the names under which it is stored.

    Attributes:
        position: id of the last folded event.
        step: the last plan whose groups the fold has taken; 0 before the first.
        manifest_hash: hash of that plan.
        next_row_id: first row id of the next batch.
        fold: content of the fold.
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


OBJECTS: Final[dict[str, type[Any]]] = {
    "planner": PlannerSnapshot,
    "fold": FoldState,
    "group": GroupMembers,
    "ready_group": ReadyGroup,
    "evals": EvalResults,
    "eval_result": EvalResult,
    "spread": Spread,
    "figures": Figures,
    "metric_figures": MetricStatistics,
    "tag_figures": TagStatistics,
    "value_figures": ValueStatistics,
}
"""Stored name of each class; its fields are stored by their own names."""

_NAMES: Final = {kind: name for name, kind in OBJECTS.items()}
_EVENTS: Final = get_args(Event)
_T = TypeVar("_T")


def encode_snapshot(snapshot: PlannerSnapshot) -> bytes:
    """Return the record of a snapshot.

    Raises:
        TypeError: the fold holds an object of a class that has no stored name.
    """
    content = {"format": FORMAT, "planner": _encode(snapshot)}
    text = json.dumps(content, separators=(",", ":"))
    return write_frame(SNAPSHOT, zlib.compress(text.encode(), 1))


def decode_snapshot(record: bytes) -> PlannerSnapshot:
    """Return the snapshot of a record."""
    header = read_header(record, kind=SNAPSHOT)
    with reading("no snapshot of a planner"):
        content: Any = json.loads(zlib.decompress(header))
        check_format("snapshot", content["format"], newest=FORMAT, oldest=FORMAT)
        snapshot = _decode(content["planner"])
    if not isinstance(snapshot, PlannerSnapshot):
        raise CorruptRecordError(f"no snapshot of a planner, but a {type(snapshot).__name__}")
    return snapshot


def _encode(value: Any) -> Any:
    if value is None or type(value) in {bool, int, float, str}:
        return value
    if isinstance(value, TrajectoryKey):
        return ["k", *value]
    if isinstance(value, _EVENTS):
        return ["e", base64.b64encode(encode_event(cast("Event", value))).decode()]
    if type(value) in _CONTAINERS:
        return [_CONTAINERS[type(value)], *map(_encode, value)]
    if type(value) is dict:
        items = cast("dict[Any, Any]", value).items()
        return ["d", *([_encode(key), _encode(each)] for key, each in items)]
    kind = cast("type[Any]", type(value))
    if kind not in _NAMES:
        raise TypeError(f"a snapshot cannot hold a {kind.__name__}: name it in {__name__}")
    return [
        "o",
        _NAMES[kind],
        {each.name: _encode(getattr(value, each.name)) for each in fields(value)},
    ]


def _decode(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, *rest = cast("list[Any]", value)
    return _known(_DECODERS, kind, "kind of value")(rest)


def _decode_object(rest: list[Any]) -> Any:
    name, given = rest
    made = _known(OBJECTS, name, "object")
    names = {each.name: each.name for each in fields(made)}
    return made(
        **{_known(names, each, f"field of {name}"): _decode(value) for each, value in given.items()}
    )


def _known(table: Mapping[str, _T], name: str, what: str) -> _T:
    if name not in table:
        raise UnknownFormatError("snapshot", FORMAT, FORMAT, f"the {what} {name!r}")
    return table[name]


_CONTAINERS: Final[dict[type[Any], str]] = {tuple: "t", list: "l", set: "s"}
_DECODERS: Final[dict[str, Callable[[list[Any]], Any]]] = {
    "t": lambda rest: tuple([_decode(each) for each in rest]),
    "l": lambda rest: [_decode(each) for each in rest],
    "s": lambda rest: {_decode(each) for each in rest},
    "d": lambda rest: {_decode(key): _decode(each) for key, each in rest},
    "k": lambda rest: TrajectoryKey(*rest),
    "e": lambda rest: decode_event(base64.b64decode(rest[0])),
    "o": _decode_object,
}
