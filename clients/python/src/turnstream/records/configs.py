"""Run configurations as JSON text, readable in the store."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, fields
from typing import Any, Final, cast

from turnstream.batching.config import BatchingConfig
from turnstream.errors import CorruptRecordError, InvalidConfigError, UnknownFormatError
from turnstream.types import DeclaredColumn

MAJOR_VERSION: Final = 0


def encode_config(config: BatchingConfig) -> str:
    """Canonical JSON: every field, sorted, with the version of the format."""
    return json.dumps({"format": MAJOR_VERSION, **asdict(config)}, sort_keys=True)


def decode_config(text: str | bytes) -> BatchingConfig:
    """The configuration of a JSON text, validated as a whole.

    Fields that this release does not know are ignored; the stored text keeps them.

    Raises:
        CorruptRecordError: the text is no JSON object of ours.
        UnknownFormatError: a newer major version.
        InvalidConfigError: a field is missing or has a value that cannot work.
    """
    try:
        stored: Any = json.loads(text)
        version = stored["format"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptRecordError(f"no run configuration: {error!r}") from error
    if not isinstance(version, int):
        raise CorruptRecordError(f"no run configuration: its format is {version!r}")
    if version > MAJOR_VERSION:
        raise UnknownFormatError("run configuration", version, MAJOR_VERSION)
    known: dict[str, Any] = {}
    for field in fields(BatchingConfig):
        if field.name in stored:
            known[field.name] = _checked(field.name, stored[field.name], like=field.default)
        elif field.default is MISSING:
            raise InvalidConfigError(field.name, "is missing")
    if "extra_columns" in known:
        known["extra_columns"] = _known_declarations(known["extra_columns"])
    return BatchingConfig(**known)


def _known_declarations(stored: Any) -> Any:
    """The declarations without the fields that this release does not know."""
    if not isinstance(stored, list):
        return stored  # BatchingConfig says what is wrong with it
    names = {field.name for field in fields(DeclaredColumn)}
    objects = cast("list[Any]", stored)
    return [
        {name: one[name] for name in names & one.keys()} if isinstance(one, dict) else one
        for one in objects
    ]


def _checked(name: str, value: Any, *, like: object) -> Any:
    """The value, if it is a text or a truth value wherever the default is one.

    Numbers and lists are checked by BatchingConfig, which also takes them from code.
    """
    if isinstance(like, bool | str) and type(value) is not type(like):
        raise InvalidConfigError(name, f"{value!r} is no {type(like).__name__}")
    return value
