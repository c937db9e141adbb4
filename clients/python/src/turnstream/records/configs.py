"""Run configurations as JSON text, readable in the store."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import MISSING, asdict, fields
from functools import lru_cache
from typing import Any, Final, cast

from turnstream.batching.config import BatchingConfig, GroupFilter
from turnstream.errors import InvalidConfigError, UnknownFormatError
from turnstream.records.encoding import check_format, reading
from turnstream.types import DeclaredColumn

RUN_FORMAT: Final = 3
"""Format of all stored state of a run, written into each of its configurations.

It grows with every change of stored state that an older release would misread. A process that opens
a run reads its configuration first, and refuses a run of another format. The scripts that admit
groups compare the same number: see open_group.lua.
"""


def encode_config(config: BatchingConfig) -> str:
    """Return canonical JSON: every field, sorted, with the version of the format."""
    return json.dumps({"format": RUN_FORMAT, **asdict(config)}, sort_keys=True)


@lru_cache(maxsize=64)  # a leader reads its config again for each batch
def decode_config(text: str | bytes, *, run: str = "") -> BatchingConfig:
    """Return the configuration of a JSON text, validated as a whole; errors name the `run`."""
    with reading("no run configuration"):
        stored: Any = json.loads(text)
        version = stored["format"]
    name = f"run {run!r}" if run else "run configuration"
    check_format(name, version, newest=RUN_FORMAT, oldest=RUN_FORMAT)
    _check_names(name, "setting", stored, {"format"}.union(_names_of(BatchingConfig)))
    known: dict[str, Any] = {}
    for field in fields(BatchingConfig):
        if field.name in stored:
            known[field.name] = stored[field.name]
        elif field.default is MISSING:
            raise InvalidConfigError(field.name, "is missing")
    for setting, (what, kind) in _OBJECTS.items():
        given = known.get(setting)
        if isinstance(given, list):  # BatchingConfig refuses anything else
            for each in cast("list[Any]", given):
                _check_names(name, f"field of {what}", each, _names_of(kind))
    return BatchingConfig(**known)


_OBJECTS: Final[Mapping[str, tuple[str, type[DeclaredColumn | GroupFilter]]]] = {
    "extra_columns": ("an extra column", DeclaredColumn),
    "group_filters": ("a group filter", GroupFilter),
}
"""Settings that are lists of objects: the word for one of them, and its type."""


def _names_of(kind: type[BatchingConfig | DeclaredColumn | GroupFilter]) -> set[str]:
    return {field.name for field in fields(kind)}


def _check_names(record: str, what: str, stored: object, names: Set[str]) -> None:
    """Refuse an object with an unknown name."""
    if isinstance(stored, dict) and (unknown := cast("dict[str, Any]", stored).keys() - names):
        raise UnknownFormatError(record, RUN_FORMAT, RUN_FORMAT, f"the {what} {min(unknown)!r}")
