"""Turns as records: a protobuf header, then the raw arrays.

The arrays are, in this order: token_ids int32 (new prompt tokens, then the response), logprobs
float32, rewards float32, token_weights float32, loss_mask uint8, then the extra columns in order of
name, of any type. A mask of ones, rewards of zeros and weights equal to the mask are left out, so
that the same turn always has the same bytes. Records with token_weights have version 1: readers of
an older release refuse them, and do not train the tokens unweighted.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from turnstream.errors import CorruptRecordError, InvalidTurnError
from turnstream.records.encoding import (
    MAJOR_VERSION,
    TURN,
    WEIGHTED_VERSION,
    Frame,
    check_frames,
    parse_message,
    read_frame,
    write_frame,
)
from turnstream.types import NO_PARENT, ExtraPiece, StoredTurn, Turn, TurnShape, VersionRun
from turnstream.types.extras import EXTRA_DTYPES
from turnstream.types.names import call_id_trouble
from turnstream.types.turns import TurnValues, turn_values
from turnstream.wire.v1 import records_pb2 as wire

EXTRA_PREFIX: Final = "extra."
"""Prefix of extra columns: their names differ from those of all other arrays."""


class _ArrayType(NamedTuple):
    dtype: np.dtype[Any]
    name: str  # as on the wire; the name of a dtype costs a microsecond


_TYPES: Final = {
    "token_ids": _ArrayType(np.dtype("<i4"), "int32"),
    "logprobs": _ArrayType(np.dtype("<f4"), "float32"),
    "rewards": _ArrayType(np.dtype("<f4"), "float32"),
    "token_weights": _ArrayType(np.dtype("<f4"), "float32"),
    "loss_mask": _ArrayType(np.dtype("u1"), "uint8"),
}

_MAX_HEADER_BYTES: Final = 1024
"""Longer headers are read without the caches of messages, which unknown fields could fill."""

_SPEC_HEADS: Final = {
    name: [
        wire.TurnHeader(
            arrays=[wire.ArraySpec(name=name, dtype=known.name, shape=(1 << 7 * num_bytes - 7,))]
        ).SerializeToString()[:-num_bytes]
        for num_bytes in (1, 2)
    ]
    for name, known in _TYPES.items()
}
"""Messages of arrays without the one or two bytes of a length, which are their last: no message is
built for each array of each turn."""


def encode_turn(turn: StoredTurn) -> bytes:
    """Return the record of a turn; its last four bytes are the `payload_crc` of `decode_turn`."""
    contradiction = _contradiction(turn)
    if contradiction:
        raise InvalidTurnError(*contradiction)
    arrays = {name: getattr(turn, name) for name in _TYPES}
    arrays = {n: None if a is None else np.ascontiguousarray(a) for n, a in arrays.items()}
    turn = replace(turn, **arrays)
    return encode_checked(turn, turn.index, turn.shape, (turn.token_ids,), turn.extras, turn.anchor)


def encode_checked(
    turn: Turn | StoredTurn,
    index: int,
    shape: TurnShape,
    tokens: Sequence[NDArray[np.int32]],
    extras: Mapping[str, ExtraPiece],
    anchor: int | None,
) -> bytes:
    """Return the record of a turn whose values are checked, and whose arrays are contiguous.

    Args:
        index: position in the trajectory, from 0.
        shape: the lengths of the turn.
        turn: has the log-probabilities, rewards, weights, mask and versions of the response, and
            the id of its call.
        tokens: joined, the new tokens of the prompt and those of the response.
        extras: own values of the extra columns.
        anchor: hash of the state at the beginning of the turn.
    """
    num_response = shape.num_response_tokens
    head = wire.TurnHeader(
        index=index,
        parent_turn=shape.parent_turn,
        shared_tokens=shape.shared_tokens,
        num_response_tokens=num_response,
    )
    header = [head.SerializeToString()]
    header.append(_spec("token_ids", shape.num_new_prompt_tokens + num_response))
    arrays: list[NDArray[Any]] = [*tokens]
    version = MAJOR_VERSION
    if turn.logprobs is not None:
        header.append(_spec("logprobs", num_response))
        arrays.append(turn.logprobs)
    if turn.rewards is not None and turn.rewards.any():
        header.append(_spec("rewards", num_response))
        arrays.append(turn.rewards)
    if turn.token_weights is not None and not _equal_the_mask(turn.token_weights, turn.loss_mask):
        header.append(_spec("token_weights", num_response))
        arrays.append(turn.token_weights)
        version = WEIGHTED_VERSION
    if turn.loss_mask is not None and shape.num_trained_tokens < num_response:
        header.append(_spec("loss_mask", num_response))
        arrays.append(turn.loss_mask)
    if extras:
        header.append(_extra_specs(extras, arrays))
    if turn.version_runs:
        runs = turn.version_runs
        header.append(_one_run(*runs[0]) if len(runs) == 1 else _runs(runs))
    if anchor is not None:
        header.append(wire.TurnHeader(anchor=anchor).SerializeToString())
    if turn.call_id is not None:
        header.append(wire.TurnHeader(call_id=turn.call_id).SerializeToString())
    return write_frame(TURN, b"".join(header), arrays, version=version)


def _extra_specs(extras: Mapping[str, ExtraPiece], arrays: list[NDArray[Any]]) -> bytes:
    """Add the arrays of the extra columns; return their specs inside a header."""
    specs: list[wire.ArraySpec] = []
    for name in sorted(extras):
        num_shared, values = extras[name]
        values = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
        arrays.append(values)
        name, dtype = EXTRA_PREFIX + name, values.dtype.name
        specs.append(
            wire.ArraySpec(name=name, dtype=dtype, shape=values.shape, num_shared=num_shared)
        )
    return wire.TurnHeader(arrays=specs).SerializeToString()


def _runs(runs: Iterable[tuple[int | None, int]]) -> bytes:
    """Return the versions inside a header."""
    messages = [wire.VersionRun(version=version, count=count) for version, count in runs]
    return wire.TurnHeader(version_runs=messages).SerializeToString()


@functools.lru_cache(maxsize=2048)
def _one_run(version: int | None, count: int) -> bytes:
    """Return the one run of most turns inside a header; its length recurs."""
    return _runs([(version, count)])


def _spec(name: str, length: int) -> bytes:
    """Return the bytes of an array's spec inside a header.

    >>> _spec("loss_mask", 300) == wire.TurnHeader(
    ...     arrays=[wire.ArraySpec(name="loss_mask", dtype="uint8", shape=(300,))]
    ... ).SerializeToString()
    True
    """
    if length < 1 << 7:
        return _SPEC_HEADS[name][0] + bytes((length,))
    if length < 1 << 14:
        return _SPEC_HEADS[name][1] + bytes((length & 0x7F | 0x80, length >> 7))
    return wire.TurnHeader(
        arrays=[wire.ArraySpec(name=name, dtype=_TYPES[name].name, shape=(length,))]
    ).SerializeToString()


def decode_turn(record: bytes) -> StoredTurn:
    """Return the turn of a record; its arrays are read-only views into `record`."""
    return _turn(record, read_frame(record, kind=TURN))


def _turn(record: bytes, frame: Frame) -> StoredTurn:
    header = parse_message(wire.TurnHeader, frame.header)
    columns, extras = _arrays(record, frame, header.arrays)
    if "token_ids" not in columns:
        raise CorruptRecordError(f"turn {header.index} has no token_ids")
    if ("token_weights" in columns) != (frame.version == WEIGHTED_VERSION):
        names = [spec.name for spec in header.arrays]
        raise CorruptRecordError(
            f"turn {header.index}: a record of version {frame.version} with the arrays {names}"
        )
    turn = StoredTurn(
        index=header.index,
        parent_turn=header.parent_turn,
        shared_tokens=header.shared_tokens,
        num_response_tokens=header.num_response_tokens,
        version_runs=tuple(map(_version_run, header.version_runs)),
        payload_crc=frame.crc,
        anchor=header.anchor if header.HasField("anchor") else None,
        call_id=header.call_id or None,
        **columns,
        extras=extras,
    )
    if contradiction := _contradiction(turn):
        raise CorruptRecordError(f"turn {turn.index}: {': '.join(contradiction)}")
    return turn


def read_turns(records: Sequence[bytes]) -> list[TurnValues]:
    """Return the turns of records as `decode_turn` does, each as the values of StoredTurns.

    In a turn without extra columns, lengths and types agree, but values are not checked: one check
    of joined columns costs less.
    """
    try:
        frames = check_frames(records, kind=TURN)
    except ValueError:
        return [turn_values(decode_turn(record)) for record in records]
    return [*map(_turn_values, records, frames)]


def _turn_values(record: bytes, frame: tuple[int, int]) -> TurnValues:
    try:
        return _plain_turn(record, frame)
    except (DecodeError, ValueError):
        return turn_values(_turn(record, read_frame(record, kind=TURN, is_whole=True)))


def _plain_turn(record: bytes, frame: tuple[int, int]) -> TurnValues:
    """Return the turn of a record without extra columns; a ValueError for any other."""
    version, num_header_bytes = frame
    if num_header_bytes > _MAX_HEADER_BYTES:
        raise ValueError
    start, stop = 8 + num_header_bytes, len(record) - 4
    parts = wire.TurnHeaderParts.FromString(record[8:start])
    parent, shared, num_response = parts.parent_turn, parts.shared_tokens, parts.num_response_tokens
    start += -num_header_bytes % 8
    arrays: list[NDArray[Any] | None] = [None] * len(_TYPES)
    for message in parts.arrays[:]:
        place, dtype, num_values = _plain_spec(message)
        is_long = num_values > num_response and place > 0
        if arrays[place] is not None or num_values < num_response or is_long:
            raise ValueError
        arrays[place] = np.frombuffer(record, dtype, num_values, start)
        start += num_values * dtype.itemsize
    ids, logprobs, rewards, weights, mask = arrays
    is_sound = NO_PARENT <= parent < parts.index and (not shared or parent != NO_PARENT)
    is_whole = start == stop and ids is not None
    if not is_sound or not is_whole or (weights is None) == (version == WEIGHTED_VERSION):
        raise ValueError
    runs = parts.version_runs[:]
    versions = _plain_run(runs[0]) if len(runs) == 1 else sum(map(_plain_run, runs), ())
    crc = int.from_bytes(record[stop:], "little")
    return parent, shared, ids, num_response, logprobs, mask, rewards, weights, versions, crc, {}


@lru_cache(maxsize=8192)
def _plain_spec(message: bytes) -> tuple[int, np.dtype[Any], int]:
    """Return place in `_TYPES`, type and length of an array; a ValueError for any other."""
    spec = wire.ArraySpec.FromString(message)
    (length,) = spec.shape
    place = [(name, known.name) for name, known in _TYPES.items()].index((spec.name, spec.dtype))
    return place, _TYPES[spec.name].dtype, length


@lru_cache(maxsize=8192)
def _plain_run(message: bytes) -> tuple[VersionRun, ...]:
    return (_version_run(wire.VersionRun.FromString(message)),)


def _equal_the_mask(weights: NDArray[np.float32], mask: NDArray[np.uint8] | None) -> bool:
    return bool(np.all(weights == (1 if mask is None else mask)))


def _arrays(
    record: bytes, frame: Frame, specs: Iterable[wire.ArraySpec]
) -> tuple[dict[str, Any], dict[str, ExtraPiece]]:
    """Return the arrays of a record as views, by name, and its extra columns."""
    columns: dict[str, Any] = {}
    others: dict[str, ExtraPiece] = {}  # also arrays that only newer releases read
    start, stop = frame.body_start, frame.body_stop
    for spec in specs:
        name, shape = spec.name, spec.shape
        dtype = _DTYPES.get(spec.dtype)
        if dtype is None:
            raise CorruptRecordError(f"an array has the dtype {spec.dtype!r}, which is no number")
        num_values = shape[0] if len(shape) == 1 else prod(shape)
        num_bytes = num_values * dtype.itemsize
        if start + num_bytes > stop:
            raise CorruptRecordError(f"array {name!r} of {num_bytes} bytes leaves its record")
        if name in columns or name in others:
            raise CorruptRecordError(f"array {name!r} is declared twice")
        values = np.frombuffer(record, dtype, num_values, start)
        if len(shape) != 1:
            values = values.reshape(tuple(shape))
        if name in _TYPES:
            columns[name] = values
        else:
            others[name] = ExtraPiece(spec.num_shared, values)
        start += num_bytes
    if start != stop:
        raise CorruptRecordError(f"{stop - start} stray bytes after the arrays")
    return columns, {
        name.removeprefix(EXTRA_PREFIX): piece
        for name, piece in others.items()
        if name.startswith(EXTRA_PREFIX)
    }


# A table: numpy accepts "2f4" and much more as a type, or raises other errors.
_DTYPES: Final = {np.dtype(code).name: np.dtype(f"<{code}") for code in "?bBhHiIqQefd"}


def _version_run(run: wire.VersionRun) -> VersionRun:
    return VersionRun(run.version if run.HasField("version") else None, run.count)


def _contradiction(turn: StoredTurn) -> tuple[str, str] | None:
    """Return the first field with a contradiction, and its text; None if there is none."""
    return _contradiction_of_lengths(turn) or _contradiction_of_values(turn)


def _contradiction_of_lengths(turn: StoredTurn) -> tuple[str, str] | None:
    num_response = turn.num_response_tokens
    if not NO_PARENT <= turn.parent_turn < turn.index:
        return "parent_turn", f"{turn.parent_turn} is not before turn {turn.index}"
    if turn.parent_turn == NO_PARENT and turn.shared_tokens:
        return "shared_tokens", f"{turn.shared_tokens}, but the turn has no parent"
    if not 0 <= num_response <= turn.token_ids.size:  # it may have no dimension
        return "num_response_tokens", f"{num_response} of {turn.token_ids.size} token_ids"
    for name, known in _TYPES.items():
        array = getattr(turn, name)
        if array is None:
            continue
        if array.dtype != known.dtype or array.ndim != 1:
            return name, f"{array.dtype}{list(array.shape)} is not one row of {known.name}"
        if array is not turn.token_ids and len(array) != num_response:
            return name, f"{len(array)} values for {num_response} response tokens"
    return None


def _contradiction_of_values(turn: StoredTurn) -> tuple[str, str] | None:
    if turn.call_id is not None and (trouble := call_id_trouble(turn.call_id)):
        return "call_id", trouble
    if turn.loss_mask is not None and turn.loss_mask.max(initial=0) > 1:
        return "loss_mask", f"{turn.loss_mask.max()} is neither 0 nor 1"
    if turn.token_weights is not None:
        wrong = turn.token_weights[~(turn.token_weights >= 0) | np.isinf(turn.token_weights)]
        if len(wrong):
            return "token_weights", f"{wrong[0]} is not a finite number of at least 0"
    if turn.version_runs:
        num_versioned = sum(run.num_tokens for run in turn.version_runs)
        if num_versioned != turn.num_response_tokens:
            return (
                "version_runs",
                f"cover {num_versioned} of {turn.num_response_tokens} response tokens",
            )
    return _extras_contradiction(turn) if turn.extras else None


def _extras_contradiction(turn: StoredTurn) -> tuple[str, str] | None:
    for name, (num_shared, values) in turn.extras.items():
        if values.ndim == 0 or values.dtype.name not in EXTRA_DTYPES:
            return f"extras[{name!r}]", f"{values.dtype}{list(values.shape)} are no values"
        if num_shared < 0 or (num_shared and turn.parent_turn == NO_PARENT):
            return f"extras[{name!r}]", f"{num_shared} values shared with turn {turn.parent_turn}"
    return None
