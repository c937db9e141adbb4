"""The columns of Arrow bodies, with their types. They are listed in docs/http.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from turnstream.errors import InvalidTurnError

EXTRA: Final = "extras."
"""Prefix of the columns of declared extra columns."""

ANY_EXTRA: Final = f"{EXTRA}<name>"
"""Stands for all of these in the tables below."""

_NO_CHILDREN: Final = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


class Kind(NamedTuple):
    """Types that a column may have, with their name for errors."""

    name: str
    accepts: Callable[[pa.DataType], bool]


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _is_list_of(accepts: Callable[[pa.DataType], bool]) -> Callable[[pa.DataType], bool]:
    def is_list(kind: pa.DataType) -> bool:
        is_variable = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        return is_variable and accepts(kind.value_type)

    return is_list


def _is_map_to(accepts: Callable[[pa.DataType], bool]) -> Callable[[pa.DataType], bool]:
    def is_map(kind: pa.DataType) -> bool:
        return pa.types.is_map(kind) and _is_text(kind.key_type) and accepts(kind.item_type)

    return is_map


def _is_run(kind: pa.DataType) -> bool:
    if not pa.types.is_struct(kind) or kind.num_fields != 2:
        return False
    fields = {field.name: field.type for field in kind}
    return fields.keys() == {"version", "num_tokens"} and all(
        map(pa.types.is_integer, fields.values())
    )


def _is_mask(kind: pa.DataType) -> bool:
    return pa.types.is_boolean(kind) or _is_number(kind)


_TEXT: Final = Kind("string", _is_text)
_INTEGER: Final = Kind("an integer type", pa.types.is_integer)
_NUMBER: Final = Kind("a number type", _is_number)
_FLAG: Final = Kind("bool", pa.types.is_boolean)
_TOKENS: Final = Kind("list of integers, such as list<int32>", _is_list_of(pa.types.is_integer))
_VALUES: Final = Kind("list of numbers, such as list<float>", _is_list_of(_is_number))
_MASK: Final = Kind("list of uint8, bool or numbers", _is_list_of(_is_mask))
_NUMBERS: Final = Kind("map<string, double>", _is_map_to(_is_number))
_TEXTS: Final = Kind("map<string, string>", _is_map_to(_is_text))
_RUNS: Final = Kind("list<struct<version: int64, num_tokens: int32>>", _is_list_of(_is_run))
_ANCHOR: Final = Kind(
    "string, binary or uint64", lambda kind: kind in _NO_CHILDREN or pa.types.is_integer(kind)
)

_OF_TURNS: Final[dict[str, Kind]] = {
    "prompt_ids": _TOKENS,
    "response_ids": _TOKENS,
    "logprobs": _VALUES,
    "loss_mask": _MASK,
    "token_weights": _VALUES,
    "rewards": _VALUES,
}
_SCALARS_OF_TURNS: Final[dict[str, Kind]] = {
    "turn_reward": _NUMBER,
    "policy_version": _INTEGER,
    "version_runs": _RUNS,
    "anchor": _ANCHOR,
    "call_id": _TEXT,
    "allow_empty": _FLAG,
}
_OF_MEMBERS: Final[dict[str, Kind]] = {"group_id": _TEXT, "sample": _INTEGER, "attempt": _INTEGER}
_OF_GROUPS: Final[dict[str, Kind]] = {
    "num_samples": _INTEGER,
    "num_needed": _INTEGER,
    "prompt_uid": _TEXT,
    "purpose": _TEXT,
}
OF_SEALS: Final[dict[str, Kind]] = {
    "reward": _NUMBER,
    "reward_components": _NUMBERS,
    "status": _TEXT,
    "sampling": _NUMBERS,
    "tags": _TEXTS,
    "metrics": _NUMBERS,
    "awaits_reward": _FLAG,
    "siblings": _TEXT,
}
COLUMNS: Final[Mapping[str, Kind]] = {
    **_OF_MEMBERS,
    **_OF_GROUPS,
    **_OF_TURNS,
    **_SCALARS_OF_TURNS,
    **OF_SEALS,
    ANY_EXTRA: _VALUES,
}
"""All columns of whole trajectories, with their types."""

TURN_COLUMNS: Final[Mapping[str, Kind]] = {**COLUMNS, "turn": _INTEGER, "seal": _FLAG}
"""All columns of single turns."""

GROUP_COLUMNS: Final[Mapping[str, Kind]] = {
    **{name: COLUMNS[name] for name in ("group_id", *_OF_GROUPS)},
    "samples": _TOKENS,
}
"""All columns of groups."""

REQUIRED: Final = ("group_id", "sample", "num_samples", "prompt_ids", "response_ids")
REQUIRED_OF_TURNS: Final = ("group_id", "sample", "turn", "prompt_ids", "response_ids")
REQUIRED_OF_GROUPS: Final = ("group_id", "num_samples")


def check_schema(
    schema: pa.Schema, columns: Mapping[str, Kind], *, required: Sequence[str]
) -> None:
    """Raise InvalidTurnError, which names a column that is unknown, missing or of a wrong type."""
    for name in required:
        if name not in schema.names:
            raise InvalidTurnError(f"column {name}", f"is missing; expected {columns[name].name}")
    for field in schema:
        if schema.names.count(field.name) > 1:
            raise InvalidTurnError(f"column {field.name}", "is there more than once")
        kind = columns.get(ANY_EXTRA if field.name.startswith(EXTRA) else field.name)
        if kind is None:
            known = ", ".join(columns)
            raise InvalidTurnError(f"column {field.name}", f"is unknown, expected some of {known}")
        if not kind.accepts(field.type):
            raise InvalidTurnError(
                f"column {field.name}", f"has the type {field.type}, expected {kind.name}"
            )
