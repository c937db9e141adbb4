"""Results of evaluations as records: JSON in the usual frame."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from turnstream.errors import CorruptRecordError
from turnstream.records.figures import figures_of_plain, plain_figures
from turnstream.records.framing import EVALUATION, read_header, write_frame
from turnstream.types import EvalGroup, EvalResult, Spread

_Decoded = TypeVar("_Decoded", EvalGroup, EvalResult)


def encode_eval_group(group: EvalGroup) -> bytes:
    """The record of a group; the same group always gives the same bytes."""
    return _write(
        {
            "group_id": group.group_id,
            "prompt_uid": group.prompt_uid,
            "version": group.version,
            "num_trajectories": group.num_trajectories,
            "num_lost": group.num_lost,
            "reward": _plain_spread(group.reward),
            "best": group.best,
        }
    )


def decode_eval_group(record: bytes) -> EvalGroup:
    """The group of a record.

    Raises:
        CorruptRecordError: the bytes are damaged or are no group.
        UnknownFormatError: another release wrote it.
    """
    return _decoded(
        record,
        lambda values: EvalGroup(
            group_id=values["group_id"],
            prompt_uid=values["prompt_uid"],
            best=values["best"],
            **_shared(values),
        ),
    )


def encode_eval_result(result: EvalResult) -> bytes:
    """The record of what a version gave, without its groups one by one."""
    return _write(
        {
            "version": result.version,
            "num_groups": result.num_groups,
            "num_trajectories": result.num_trajectories,
            "num_lost": result.num_lost,
            "reward": _plain_spread(result.reward),
            "best": _plain_spread(result.best),
            "figures": plain_figures(result.figures),
        }
    )


def decode_eval_result(record: bytes) -> EvalResult:
    """The result of a record, without its groups.

    Raises:
        CorruptRecordError: the bytes are damaged or are no result.
        UnknownFormatError: another release wrote it.
    """
    return _decoded(
        record,
        lambda values: EvalResult(
            num_groups=values["num_groups"],
            best=_spread(values["best"]),
            figures=figures_of_plain(values["figures"]),
            **_shared(values),
        ),
    )


def _write(values: Mapping[str, Any]) -> bytes:
    return write_frame(EVALUATION, json.dumps(values, separators=(",", ":")).encode())


def _decoded(record: bytes, make: Callable[[dict[str, Any]], _Decoded]) -> _Decoded:
    values = _read(record)
    try:
        return make(values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptRecordError(f"not what an evaluation gave: {error!r}") from error


def _shared(values: dict[str, Any]) -> dict[str, Any]:
    """What is said of a group and of a whole version."""
    return {
        "version": values["version"],
        "num_trajectories": values["num_trajectories"],
        "num_lost": values["num_lost"],
        "reward": _spread(values["reward"]),
    }


def _read(record: bytes) -> dict[str, Any]:
    header = read_header(record, kind=EVALUATION)
    try:
        values: object = json.loads(header)
    except ValueError as error:
        raise CorruptRecordError(f"the result of an evaluation is unreadable: {error}") from error
    if not isinstance(values, dict):
        raise CorruptRecordError("the result of an evaluation is no object")
    return cast("dict[str, Any]", values)


def _plain_spread(spread: Spread) -> list[float]:
    return [spread.num, spread.mean, spread.squares]


def _spread(values: Any) -> Spread:
    num, mean, squares = values
    return Spread(num=num, mean=mean, squares=squares)
