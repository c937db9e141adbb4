"""Results of evaluations as records: JSON in the usual frame."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, cast

from turnstream.errors import CorruptRecordError
from turnstream.records.framing import EVALUATION, read_header, write_frame
from turnstream.records.tag_statistics import figures_of_plain, plain_figures
from turnstream.types import EvalGroup, EvalResult, Figures, Spread


def encode_eval_group(group: EvalGroup) -> bytes:
    """Return the record of a group; the same group always has the same bytes."""
    return _encode(group)


def decode_eval_group(record: bytes) -> EvalGroup:
    """Return the group of a record.

    Raises:
        CorruptRecordError: the bytes are damaged or are no group.
        UnknownFormatError: another release wrote it.
    """
    values = _read(record)
    try:
        return EvalGroup(
            group_id=values["group_id"],
            prompt_uid=values["prompt_uid"],
            best=values["best"],
            **_common(values),
        )
    except _WRONG_VALUES as error:
        raise CorruptRecordError(f"no group of an evaluation: {error!r}") from error


def encode_eval_result(result: EvalResult) -> bytes:
    """Return the record of a version's result, without its single groups."""
    return _encode(result)


def decode_eval_result(record: bytes) -> EvalResult:
    """Return the result of a record, without its groups.

    Raises:
        CorruptRecordError: the bytes are damaged or are no result.
        UnknownFormatError: another release wrote it.
    """
    values = _read(record)
    try:
        return EvalResult(
            num_groups=values["num_groups"],
            best=_spread(values["best"]),
            figures=figures_of_plain(values["figures"]),
            **_common(values),
        )
    except _WRONG_VALUES as error:
        raise CorruptRecordError(f"no result of an evaluation: {error!r}") from error


_WRONG_VALUES = (KeyError, TypeError, ValueError, AttributeError)


def _encode(value: EvalGroup | EvalResult) -> bytes:
    names = [each.name for each in fields(value) if each.name != "groups"]
    plain = {name: _plain(getattr(value, name)) for name in names}
    return write_frame(EVALUATION, json.dumps(plain, separators=(",", ":")).encode())


def _plain(value: object) -> object:
    match value:
        case Spread():
            return [value.num, value.mean, value.squares]
        case Figures():
            return plain_figures(value)
        case _:
            return value


def _read(record: bytes) -> dict[str, Any]:
    header = read_header(record, kind=EVALUATION)
    try:
        values: object = json.loads(header)
    except ValueError as error:
        raise CorruptRecordError(f"the result of an evaluation is unreadable: {error}") from error
    if not isinstance(values, dict):
        raise CorruptRecordError("the result of an evaluation is no object")
    return cast("dict[str, Any]", values)


def _common(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a group and of a whole version."""
    return {
        "version": values["version"],
        "num_trajectories": values["num_trajectories"],
        "num_lost": values["num_lost"],
        "reward": _spread(values["reward"]),
    }


def _spread(values: Any) -> Spread:
    num, mean, squares = values
    return Spread(num=num, mean=mean, squares=squares)
