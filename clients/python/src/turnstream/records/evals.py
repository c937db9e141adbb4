"""Results of evaluations as records: JSON in the usual frame."""

from __future__ import annotations

import json
from typing import TypeVar

from turnstream.records.encoding import (
    EVALUATION,
    read_header,
    read_value,
    reading,
    to_plain,
    write_frame,
)
from turnstream.types import EvalGroup, EvalResult

_Evaluation = TypeVar("_Evaluation", EvalGroup, EvalResult)


def encode_evaluation(value: EvalGroup | EvalResult) -> bytes:
    """Return the record of a group or a result; the same value always has the same bytes."""
    return write_frame(EVALUATION, json.dumps(to_plain(value), separators=(",", ":")).encode())


def decode_evaluation(kind: type[_Evaluation], record: bytes) -> _Evaluation:
    """Return the group or result of a record."""
    with reading(f"no {kind.__name__} of an evaluation"):
        return read_value(kind, json.loads(read_header(record, kind=EVALUATION)))
