"""Results of evaluations as records: JSON in the usual frame."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TypeVar

from turnstream.errors import CorruptRecordError
from turnstream.records.framing import EVALUATION, read_header, write_frame
from turnstream.records.values import read_value, to_plain
from turnstream.types import EvalGroup, EvalResult

_Record = TypeVar("_Record", EvalGroup, EvalResult)


def encode_eval_group(group: EvalGroup) -> bytes:
    """Return the record of a group; the same group always has the same bytes."""
    return _encode(group)


def decode_eval_group(record: bytes) -> EvalGroup:
    """Return the group of a record; CorruptRecordError or UnknownFormatError if it has none."""
    return _decode(EvalGroup, record)


def encode_eval_result(result: EvalResult) -> bytes:
    """Return the record of a version's result, without its single groups."""
    return _encode(replace(result, groups=()))


def decode_eval_result(record: bytes) -> EvalResult:
    """Return the result of a record; CorruptRecordError or UnknownFormatError if it has none."""
    return _decode(EvalResult, record)


def _encode(value: EvalGroup | EvalResult) -> bytes:
    return write_frame(EVALUATION, json.dumps(to_plain(value), separators=(",", ":")).encode())


_UNREADABLE = (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError)


def _decode(kind: type[_Record], record: bytes) -> _Record:
    try:
        return read_value(kind, json.loads(read_header(record, kind=EVALUATION)))
    except _UNREADABLE as error:
        raise CorruptRecordError(f"no {kind.__name__} of an evaluation: {error!r}") from error
