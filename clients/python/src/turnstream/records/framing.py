"""The frame around every stored record.

::

    offset  bytes
    0       2      b"TS"
    2       1      kind: b"T" turn, b"E" event, b"M" manifest, b"C" compact record, b"S" snapshot,
                   b"U" compact record of ends, b"V" result of an evaluation; b"L" was a file of
                   compact records that earlier releases wrote
    3       1      major version of this kind: 1 of C and U, and of T with token weights; 0 of
                   the others
    4       4      length of the header, unsigned, little-endian
    8       h      header: a protobuf message; of C, U, S and V, packed columns or JSON
    8 + h   p      zeros, so that the body begins at a multiple of 8
            b      body: raw little-endian arrays, as the header declares them
            4      CRC-32 (zlib) of everything before it, unsigned, little-endian

A newer minor version adds header fields or arrays. Readers skip unknown ones, and services pass on
the stored bytes without encoding them again, so nothing is lost. Another major version is refused
with its number; the frame and its checksum are the same in all versions.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from numpy.typing import NDArray

from turnstream.errors import CorruptRecordError, UnknownFormatError

MAJOR_VERSION: Final = 0
"""Version of all kinds except compact records."""

COMPACT_VERSION: Final = 1
"""The only version of compact records that this release reads."""

WEIGHTED_VERSION: Final = 1
"""Version of turns with token weights: an older release would train them without."""

TURN: Final = b"T"
EVENT: Final = b"E"
MANIFEST: Final = b"M"
COMPACT: Final = b"C"
SNAPSHOT: Final = b"S"
ENDS: Final = b"U"
EVALUATION: Final = b"V"

_NAMES: Final = {
    TURN: "turn",
    EVENT: "event",
    MANIFEST: "manifest",
    COMPACT: "compact",
    SNAPSHOT: "snapshot",
    ENDS: "compact ends",
    EVALUATION: "evaluation",
}
_VERSIONS: Final = {COMPACT: COMPACT_VERSION, ENDS: COMPACT_VERSION}
_NEWEST: Final = {**_VERSIONS, TURN: WEIGHTED_VERSION}
_PREFIX: Final = struct.Struct("<2s1sBI")
_CRC: Final = struct.Struct("<I")


class Frame(NamedTuple):
    """A checked record: its protobuf header, the position of its body, its major version."""

    header: bytes
    body_start: int
    body_stop: int
    crc: int
    version: int


def write_frame(
    kind: bytes, header: bytes, body: Iterable[NDArray[Any]] = (), *, version: int | None = None
) -> bytes:
    """Return the record of a header and contiguous little-endian arrays, copied once."""
    if version is None:
        version = _VERSIONS.get(kind, MAJOR_VERSION)
    prefix = _PREFIX.pack(b"TS", kind, version, len(header))
    parts: list[Any] = [prefix, header, bytes(-len(header) % 8), *body]
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    parts.append(_CRC.pack(crc))
    return b"".join(parts)


def read_frame(record: bytes, *, kind: bytes) -> Frame:
    """Return the frame of a record after a check of kind, length, checksum and major version."""
    name = _NAMES[kind]
    if len(record) < _PREFIX.size + _CRC.size:
        raise CorruptRecordError(f"a {name} record of {len(record)} bytes is cut short")
    magic, found, version, num_header_bytes = _PREFIX.unpack_from(record)
    if magic != b"TS" or found != kind:
        raise CorruptRecordError(f"no {name} record: it begins with {bytes(record[:3])!r}")
    body_stop = len(record) - _CRC.size
    (crc,) = _CRC.unpack_from(record, body_stop)
    if zlib.crc32(memoryview(record)[:body_stop]) != crc:
        raise CorruptRecordError(f"the checksum of a {name} record of {len(record)} bytes differs")
    # After the checksum: damage must not look like another release.
    oldest = _VERSIONS.get(kind, MAJOR_VERSION)
    if version != oldest:
        check_format(name, version, newest=_NEWEST.get(kind, oldest), oldest=oldest)
    header_stop = _PREFIX.size + num_header_bytes
    body_start = header_stop + -num_header_bytes % 8
    if body_start > body_stop:
        raise CorruptRecordError(
            f"a {name} record of {len(record)} bytes has a header of {num_header_bytes}"
        )
    return Frame(record[_PREFIX.size : header_stop], body_start, body_stop, crc, version)


def check_format(record: str, found: object, *, newest: int, oldest: int = 0) -> None:
    """Refuse a format outside the range of this release; `record` names the stored state."""
    if not isinstance(found, int) or isinstance(found, bool):
        raise CorruptRecordError(f"{record}: its format is {found!r}")
    if not oldest <= found <= newest:
        raise UnknownFormatError(record, found, newest)


def read_header(record: bytes, *, kind: bytes) -> bytes:
    """Return the header of a record without arrays, checked as in `read_frame`."""
    frame = read_frame(record, kind=kind)
    if frame.body_start != frame.body_stop:
        raise CorruptRecordError(
            f"{frame.body_stop - frame.body_start} stray bytes in a {_NAMES[kind]} record"
        )
    return frame.header
