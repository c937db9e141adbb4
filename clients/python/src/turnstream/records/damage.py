"""Damaged turn records, looked at closely: what is readable of them, and where they are wrong.

Whatever trains a turn reads it with `decode_turn`, which refuses it whole. This is for people who
want to mend one.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from turnstream.errors import RecordError
from turnstream.records.turns import decode_turn
from turnstream.types import StoredTurn
from turnstream.wire.v1 import records_pb2 as wire

MAX_SEARCHED_BYTES: Final = 8 * 1024 * 1024
"""Of a record that is searched for its one wrong byte: a second and a half."""

_PREFIX_REGIONS: Final = (
    ("magic", 0, 2),
    ("kind", 2, 3),
    ("version", 3, 4),
    ("header length", 4, 8),
)
_PREFIX_BYTES: Final = 8
_CRC_BYTES: Final = 4
_DTYPES: Final = {np.dtype(code).name: np.dtype(code).newbyteorder("<") for code in "?bBhHiIqQefd"}


class Region(NamedTuple):
    """Bytes `start` to `stop` of a record, the last one excluded, and what should be there."""

    field: str
    start: int
    stop: int


class Flaw(NamedTuple):
    """Something wrong in a record.

    Attributes:
        field: what stands in these bytes; "record" where that is not known.
        start, stop: the bytes, the last one excluded.
        problem: in words.
    """

    field: str
    start: int
    stop: int
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnFindings:
    """What a close look at the record of a turn finds.

    Attributes:
        index: position among the records of its trajectory, from 0.
        record: its bytes.
        stored_crc: what the record carries; None where it is too short.
        found_crc: what its bytes have; None where it is too short.
        sealed_crc: what the seal says; None where that cannot be read, or does not know the turn.
        flaws: all that was found; empty if it is as it was sealed.
        turn: as far as it can be trusted: of a sound record, or of one whose only wrong byte was
            found by the checksum and put right. Else None.
        is_repaired: whether such a byte was put right in `turn`.
        arrays: by name, what lies where the header says, right or wrong.
    """

    index: int
    record: bytes
    stored_crc: int | None
    found_crc: int | None
    sealed_crc: int | None
    flaws: tuple[Flaw, ...]
    turn: StoredTurn | None = None
    is_repaired: bool = False
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])


def examine_turn(record: bytes, *, index: int, sealed_crc: int | None = None) -> TurnFindings:
    """What is readable of a record that may be damaged, and where it is wrong.

    A single wrong byte is found exactly, by what it does to the checksum; of more than one, only
    what contradicts itself can be named.

    Args:
        record: as it is stored.
        index: position among the records of its trajectory.
        sealed_crc: the checksum that the seal names; None where it is not known.
    """
    if len(record) < _PREFIX_BYTES + _CRC_BYTES:
        cut = Flaw("record", len(record), _PREFIX_BYTES + _CRC_BYTES, "is cut short")
        return _findings(record, index, None, None, sealed_crc, (cut,))
    stored_crc = int.from_bytes(record[-_CRC_BYTES:], "little")
    found_crc = zlib.crc32(memoryview(record)[:-_CRC_BYTES])
    expected = stored_crc if sealed_crc is None else sealed_crc
    problem, turn = _decoded(record)
    flaws: list[Flaw] = []
    is_repaired = False
    if found_crc != stored_crc or found_crc != expected:
        flaw, repaired = _of_checksum(record, stored_crc, found_crc, expected)
        flaws.append(flaw)
        turn = turn if repaired is None else _decoded(repaired)[1]
        is_repaired = repaired is not None and turn is not None
    elif problem:
        flaws.append(Flaw("record", 0, len(record), problem))
    flaws += _of_layout(record)
    arrays = dict(_arrays(record))
    if turn is not None and not is_repaired:
        flaws += _of_values(record, turn)
    return _findings(
        record, index, stored_crc, found_crc, sealed_crc, tuple(flaws), turn, is_repaired, arrays
    )


def changed_byte(body: bytes, *, found_crc: int, expected_crc: int) -> tuple[int, int] | None:
    """The place of the only wrong byte of `body`, and what it should be; None if there is none.

    A wrong byte changes the CRC-32 by the table entry of its changed bits, moved on by the bytes
    behind it. That is undone byte by byte from the end, until a table entry is left.

    >>> body = b"turns and tokens"
    >>> changed_byte(b"turns and_tokens", found_crc=zlib.crc32(b"turns and_tokens"),
    ...              expected_crc=zlib.crc32(body))
    (9, 32)
    """
    if found_crc == expected_crc or len(body) > MAX_SEARCHED_BYTES:
        return None
    left = found_crc ^ expected_crc
    for position in range(len(body) - 1, -1, -1):
        bits = _BY_TOP[left >> 24]
        entry = _TABLE[bits]
        if left == entry:
            return position, body[position] ^ bits
        left = ((left ^ entry) << 8 | bits) & 0xFFFFFFFF
    return None


def _table() -> tuple[int, ...]:
    """The CRC-32 table of zlib, by which a byte changes the checksum."""
    entries: list[int] = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0xEDB88320 if value & 1 else 0)
        entries.append(value)
    return tuple(entries)


_TABLE: Final = _table()
_BY_TOP: Final = {entry >> 24: bits for bits, entry in enumerate(_TABLE)}


def _findings(
    record: bytes,
    index: int,
    stored_crc: int | None,
    found_crc: int | None,
    sealed_crc: int | None,
    flaws: tuple[Flaw, ...],
    turn: StoredTurn | None = None,
    is_repaired: bool = False,
    arrays: Mapping[str, NDArray[Any]] | None = None,
) -> TurnFindings:
    return TurnFindings(
        index=index,
        record=record,
        stored_crc=stored_crc,
        found_crc=found_crc,
        sealed_crc=sealed_crc,
        flaws=flaws,
        turn=turn,
        is_repaired=is_repaired,
        arrays=arrays or {},
    )


def _decoded(record: bytes) -> tuple[str, StoredTurn | None]:
    try:
        return "", decode_turn(record)
    except RecordError as error:
        return str(error), None


def _of_checksum(
    record: bytes, stored_crc: int, found_crc: int, expected_crc: int
) -> tuple[Flaw, bytes | None]:
    """Where the bytes differ from what the checksum was made of, and the record put right."""
    stop = len(record) - _CRC_BYTES
    if found_crc == expected_crc:
        right = record[:stop] + expected_crc.to_bytes(_CRC_BYTES, "little")
        problem = f"is {stored_crc:08x}, the bytes and the seal have {expected_crc:08x}"
        return Flaw("checksum", stop, len(record), problem), right
    place = changed_byte(record[:stop], found_crc=found_crc, expected_crc=expected_crc)
    if place is not None and stored_crc in (expected_crc, found_crc):
        position, right_byte = place
        crc = expected_crc.to_bytes(_CRC_BYTES, "little")
        right = record[:position] + bytes([right_byte]) + record[position + 1 : stop] + crc
        name = next(each.field for each in _regions(record) if each.start <= position < each.stop)
        problem = f"is {record[position]:02x}, was {right_byte:02x}"
        if _decoded(right)[1] is not None:  # else chance found it
            return Flaw(name, position, position + 1, problem), right
    problem = f"has the checksum {found_crc:08x}, not {expected_crc:08x}"
    return Flaw("record", 0, stop, f"{problem}: more than one byte differs"), None


def _of_layout(record: bytes) -> Iterator[Flaw]:
    """What contradicts itself in the frame and the header."""
    if record[:2] != b"TS":
        yield Flaw("magic", 0, 2, f"is {record[:2]!r}, not b'TS'")
    if record[2:3] != b"T":
        yield Flaw("kind", 2, 3, f"is {record[2:3]!r}, not b'T'")
    stop = len(record) - _CRC_BYTES
    num_header = int.from_bytes(record[4:_PREFIX_BYTES], "little")
    if _PREFIX_BYTES + num_header > stop:
        yield Flaw("header length", 4, 8, f"says {num_header} bytes of {stop - _PREFIX_BYTES}")
        return
    if _header(record) is None:
        yield Flaw("header", _PREFIX_BYTES, _PREFIX_BYTES + num_header, "is unreadable")
        return
    for region in _regions(record):
        if region.stop > stop and region.field != "checksum":
            yield Flaw(*region, f"leaves the record, whose arrays end at {stop}")
        elif region.field.startswith("?"):
            yield Flaw(*region, "is of no type of numbers")


def _of_values(record: bytes, turn: StoredTurn) -> Iterator[Flaw]:
    """Numbers that no model samples, the first of every array."""
    starts = {region.field: region.start for region in _regions(record)}
    checks = (
        ("token_ids", turn.token_ids, turn.token_ids < 0),
        ("logprobs", turn.logprobs, None),
        ("rewards", turn.rewards, None),
    )
    for name, values, wrong in checks:
        if values is None:
            continue
        wrong = ~np.isfinite(values) if wrong is None else wrong
        if wrong.any():
            at = int(np.argmax(wrong))
            start = starts[name] + at * values.itemsize
            problem = f"{values[at]} at position {at}; {int(wrong.sum())} like it"
            yield Flaw(name, start, start + values.itemsize, problem)


def _header(record: bytes) -> wire.TurnHeader | None:
    num_header = int.from_bytes(record[4:_PREFIX_BYTES], "little")
    try:
        return wire.TurnHeader.FromString(record[_PREFIX_BYTES : _PREFIX_BYTES + num_header])
    except DecodeError:
        return None


def _specs(record: bytes) -> list[wire.ArraySpec]:
    header = _header(record)
    return [] if header is None else list(header.arrays)


def _regions(record: bytes) -> Iterator[Region]:
    """What should be where, by the record's own words; an array of no known type begins with ?."""
    for name, start, stop in _PREFIX_REGIONS:
        yield Region(name, start, stop)
    end = len(record) - _CRC_BYTES
    yield Region("checksum", end, len(record))
    num_header = int.from_bytes(record[4:_PREFIX_BYTES], "little")
    header_stop = min(end, _PREFIX_BYTES + num_header)
    yield Region("header", _PREFIX_BYTES, header_stop)
    start = min(end, header_stop + -num_header % 8)
    yield Region("padding", header_stop, start)
    for spec in _specs(record):
        dtype = _DTYPES.get(spec.dtype)
        if dtype is None:
            yield Region(f"?{spec.name}", min(start, end), end)
            return
        stop = start + prod(spec.shape) * dtype.itemsize
        yield Region(spec.name, start, stop)
        start = stop
    yield Region("record", min(start, end), end)


def _arrays(record: bytes) -> Iterator[tuple[str, NDArray[Any]]]:
    """The arrays that lie inside the record, as its header describes them."""
    specs = {spec.name: spec for spec in _specs(record)}
    for name, start, stop in _regions(record):
        spec = specs.get(name)
        if spec is not None and stop <= len(record) - _CRC_BYTES and prod(spec.shape):
            dtype = _DTYPES[spec.dtype]
            values = np.frombuffer(record, dtype, prod(spec.shape), start)
            yield name, values.reshape(tuple(spec.shape))
