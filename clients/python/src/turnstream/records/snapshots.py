"""What a planner knows after an event, as a record: whoever takes over goes on from there.

Values are written with their kinds, and objects by the names of their fields, so that whatever the
fold comes to know is in its snapshot by itself. Only a new class has to be named here::

    {"g": (1, None)}       ["d", ["g", ["t", 1, null]]]
    TrajectoryKey("g", 2)  ["k", "g", 2, 0]
    an event               ["e", its record in base64]
    ReadyGroup(...)        ["o", "ReadyGroup", {"group_id": "g", ...}]
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, cast, get_args

from turnstream.batching.config import BatchingConfig
from turnstream.batching.decisions import ReadyGroup
from turnstream.batching.evals import EvalFold
from turnstream.batching.members import GroupMembers
from turnstream.batching.readiness import RunFold
from turnstream.errors import CorruptRecordError, UnknownFormatError
from turnstream.records.events import decode_accepted_event, encode_event
from turnstream.records.framing import SNAPSHOT, read_header, write_frame
from turnstream.types import (
    EvalResult,
    Event,
    Figures,
    MetricFigures,
    Spread,
    TagFigures,
    TrajectoryKey,
    ValueFigures,
)

FORMAT: Final = 0
"""Of the JSON; changes when an older release would misunderstand it."""

_OBJECTS: Final[dict[str, type[Any]]] = {
    each.__name__: each
    for each in (
        *(GroupMembers, ReadyGroup, EvalFold, EvalResult, Spread),
        *(Figures, MetricFigures, TagFigures, ValueFigures),
    )
}
_EVENTS: Final = get_args(Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSnapshot:
    """What a planner knows.

    Attributes:
        position: id of the last event that it has folded in.
        step: the last plan whose groups it has taken; 0 before the first.
        manifest_hash: of that plan.
        next_row_id: the row id that the next batch begins with.
        fold: what RunFold.snapshot gave.
        versions: after which step each announced version was made.
        lineage: of the last announced version; "" before the first.
        config_revision: by which it judges.
        revised_at: the event since which it does.
    """

    position: str
    step: int
    manifest_hash: str
    next_row_id: int
    fold: dict[str, object]
    versions: Mapping[int, int] = field(default_factory=dict[int, int])
    lineage: str = ""
    config_revision: int = 1
    revised_at: str = "0-0"

    def restore_fold(self, config: BatchingConfig) -> RunFold:
        """The fold as it was.

        Raises:
            UnknownFormatError: it knows what this release does not.
        """
        try:
            return RunFold.restore(config, self.fold)
        except ValueError as error:
            raise UnknownFormatError(f"snapshot ({error})", FORMAT + 1, FORMAT) from error


def encode_snapshot(snapshot: PlannerSnapshot) -> bytes:
    """The record of a snapshot.

    Raises:
        TypeError: the fold holds an object of a class that is not named here.
    """
    content = {
        "format": FORMAT,
        "position": snapshot.position,
        "step": snapshot.step,
        "manifest_hash": snapshot.manifest_hash,
        "next_row_id": snapshot.next_row_id,
        "fold": {name: _encode(value) for name, value in snapshot.fold.items()},
        "versions": list(snapshot.versions.items()),
        "lineage": snapshot.lineage,
        "config_revision": snapshot.config_revision,
        "revised_at": snapshot.revised_at,
    }
    text = json.dumps(content, separators=(",", ":"))
    return write_frame(SNAPSHOT, zlib.compress(text.encode(), 1))


def decode_snapshot(record: bytes) -> PlannerSnapshot:
    """The snapshot of a record.

    Raises:
        CorruptRecordError: the bytes are damaged or contradict themselves.
        UnknownFormatError: a newer major version.
    """
    header = read_header(record, kind=SNAPSHOT)
    try:
        content: Any = json.loads(zlib.decompress(header))
        if content["format"] > FORMAT:
            raise UnknownFormatError("snapshot", content["format"], FORMAT)
        return PlannerSnapshot(
            position=content["position"],
            step=content["step"],
            manifest_hash=content["manifest_hash"],
            next_row_id=content["next_row_id"],
            fold={name: _decode(value) for name, value in content["fold"].items()},
            versions=dict(content["versions"]),
            lineage=content["lineage"],
            config_revision=content.get("config_revision", 1),
            revised_at=content.get("revised_at", "0-0"),
        )
    except (ValueError, TypeError, LookupError, zlib.error) as error:
        if isinstance(error, UnknownFormatError):
            raise
        raise CorruptRecordError(f"no snapshot of a planner: {error!r}") from error


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
    name = type(value).__name__
    if _OBJECTS.get(name) is not type(value):
        raise TypeError(f"a snapshot cannot hold a {name}: name it in {__name__}")
    return ["o", name, {each.name: _encode(getattr(value, each.name)) for each in fields(value)}]


def _decode(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, *rest = cast("list[Any]", value)
    return _DECODERS[kind](rest)


def _decode_object(rest: list[Any]) -> Any:
    name, given = rest
    return _OBJECTS[name](**{field: _decode(value) for field, value in given.items()})


_CONTAINERS: Final[dict[type[Any], str]] = {tuple: "t", list: "l", set: "s"}
_DECODERS: Final[dict[str, Callable[[list[Any]], Any]]] = {
    "t": lambda rest: tuple([_decode(each) for each in rest]),
    "l": lambda rest: [_decode(each) for each in rest],
    "s": lambda rest: {_decode(each) for each in rest},
    "d": lambda rest: {_decode(key): _decode(each) for key, each in rest},
    "k": lambda rest: TrajectoryKey(*rest),
    "e": lambda rest: decode_accepted_event(base64.b64decode(rest[0])),
    "o": _decode_object,
}
