"""Ways to damage bytes, and fields of protobuf messages.

Stored records carry a checksum, so plain damage rarely reaches the decoder behind it. `forged`
damage changes one field of the protobuf header and writes a checksum that fits.
"""

from __future__ import annotations

import random
import struct
import zlib

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

HUGE_NUMBERS = (2**31 - 1, 2**31, 2**32 - 1, 2**53 + 1, 2**63 - 1, 2**64 - 1)

_WRONG_TEXTS = (
    *(b"", b"x", b"a/b", b"\0", "\u00e9".encode(), b"\xff", b"x" * 600),
    *(b"0-0", b"eval", b"maze~2"),
)
_PREFIX = struct.Struct("<2s1sBI")
_NUM_CRC_BYTES = 4
_VARINT = 0
_WIDTHS = {0: 0, 1: 8, 2: 0, 5: 4}
"""Bytes of a field by its wire type: varint, fixed64, bytes, fixed32; 0 if they vary."""


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes after one random change; a framed record may get a fitting checksum."""
    ways = [*PLAIN_WAYS]
    if is_framed(data):
        ways += [forged_field, forged_field, forged_header, newer_version]
    return rng.choice(ways)(data, rng)


def random_bytes(data: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((len(data), len(data), 0, 1, 7, 4_096)))


def truncated(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) or 1)]


def flipped(data: bytes, rng: random.Random) -> bytes:
    """Flip some bits of one byte.

    >>> flipped(b"", random.Random(0)), len(flipped(b"a", random.Random(0)))
    (b'', 1)
    """
    if not data:
        return data
    place = rng.randrange(len(data))
    bits = rng.choice((1 << rng.randrange(8), rng.randrange(1, 256)))
    return data[:place] + bytes([data[place] ^ bits]) + data[place + 1 :]


def repeated(data: bytes, rng: random.Random) -> bytes:
    return data * rng.choice((2, 3, 50))


PLAIN_WAYS = (random_bytes, truncated, flipped, flipped, repeated)


def is_framed(data: bytes) -> bool:
    """Return whether these bytes are a stored record with a checksum."""
    return data[:2] == b"TS" and len(data) >= _PREFIX.size + _NUM_CRC_BYTES


def forged_field(data: bytes, rng: random.Random) -> bytes:
    header, body = _split(data)
    return _join(data, damaged_message(header, rng), body)


def forged_header(data: bytes, rng: random.Random) -> bytes:
    header, body = _split(data)
    return _join(data, flipped(header, rng), body)


def newer_version(data: bytes, rng: random.Random) -> bytes:
    header, body = _split(data)
    return _join(data[:3] + bytes([rng.randrange(2, 256)]) + data[4:], header, body)


def damaged_message(message: bytes, rng: random.Random) -> bytes:
    """Return a protobuf message with one field changed, at any depth.

    >>> damaged_message(b"", random.Random(0)) != b""
    True
    """
    fields = _fields(message)
    if not fields:
        return _encode([(rng.randrange(1, 60), _VARINT, rng.choice(HUGE_NUMBERS))])
    place = rng.randrange(len(fields))
    number, kind, value = fields[place]
    if rng.random() < 0.1:
        return _encode(fields[:place] + fields[place + 1 :])
    if rng.random() < 0.1:
        return _encode([*fields, fields[place]])
    fields[place] = (number, kind, _changed(value, rng))
    return _encode(fields)


def _changed(value: int | bytes, rng: random.Random) -> int | bytes:
    if isinstance(value, int):
        return rng.choice((*HUGE_NUMBERS, 0, value + 1, value ^ 1))
    inner = _fields(value)
    if inner and rng.random() < 0.8:
        return damaged_message(value, rng)
    return rng.choice(_WRONG_TEXTS) if rng.random() < 0.3 else damaged(value, rng)


def _split(record: bytes) -> tuple[bytes, bytes]:
    length = _PREFIX.unpack_from(record)[3]
    start = _PREFIX.size + length
    return record[_PREFIX.size : start], record[start + -length % 8 : -_NUM_CRC_BYTES]


def _join(record: bytes, header: bytes, body: bytes) -> bytes:
    """Return the record with another header, and a checksum that fits."""
    magic, kind, version, _ = _PREFIX.unpack_from(record)
    start = _PREFIX.pack(magic, kind, version, len(header))
    framed = start + header + bytes(-len(header) % 8) + body
    return framed + struct.pack("<I", zlib.crc32(framed))


_Field = tuple[int, int, int | bytes]


def _fields(message: bytes) -> list[_Field]:
    """Return the fields of a protobuf message, in order; none if it cannot be parsed."""
    holder = Empty()
    try:
        holder.ParseFromString(message)
    except DecodeError:
        return []
    found = [(each.field_number, each.wire_type, each.data) for each in UnknownFieldSet(holder)]
    return [each for each in found if each[1] in _WIDTHS]


def _encode(fields: list[_Field]) -> bytes:
    parts: list[bytes] = []
    for number, kind, value in fields:
        parts.append(_varint(number << 3 | kind))
        if isinstance(value, bytes):
            parts += [_varint(len(value)), value]
        elif width := _WIDTHS[kind]:
            parts.append((value % 2 ** (8 * width)).to_bytes(width, "little"))
        else:
            parts.append(_varint(value % 2**64))
    return b"".join(parts)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
