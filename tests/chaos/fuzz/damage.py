"""Ways to damage bytes, and fields of protobuf messages.

Stored records carry a checksum, so plain damage rarely reaches the decoder behind it. `forged`
damage changes one field of the protobuf header and writes a checksum that fits.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

HUGE_NUMBERS = (2**31 - 1, 2**31, 2**32 - 1, 2**53 + 1, 2**63 - 1, 2**64 - 1)

_PREFIX = struct.Struct("<2s1sBI")
_NUM_CRC_BYTES = 4
_VARINT = 0
_WIDTHS = {0: 0, 1: 8, 2: 0, 5: 4}
"""Bytes of a field by its wire type: varint, fixed64, bytes, fixed32; 0 if they vary."""


class Damage(NamedTuple):
    """Damaged bytes; the checksum of forged ones fits."""

    how: str
    data: bytes
    is_forged: bool = False


def damaged(data: bytes, rng: random.Random) -> Damage:
    """Return the bytes after one random change; a framed record may get a fitting checksum."""
    ways: list[Callable[[bytes, random.Random], Damage]] = [*PLAIN_WAYS]
    if is_framed(data):
        ways += [forged_field, forged_field, forged_header, newer_version]
    return rng.choice(ways)(data, rng)


def random_bytes(data: bytes, rng: random.Random) -> Damage:
    length = rng.choice((len(data), len(data), 0, 1, 7, 4_096))
    return Damage("random bytes", rng.randbytes(length))


def truncated(data: bytes, rng: random.Random) -> Damage:
    return Damage("truncated", data[: rng.randrange(len(data) or 1)])


def flipped_bit(data: bytes, rng: random.Random) -> Damage:
    return Damage("one bit flipped", _changed_byte(data, rng, 1 << rng.randrange(8)))


def flipped_byte(data: bytes, rng: random.Random) -> Damage:
    return Damage("one byte flipped", _changed_byte(data, rng, rng.randrange(1, 256)))


def _changed_byte(data: bytes, rng: random.Random, bits: int) -> bytes:
    """Flip these bits of one byte.

    >>> _changed_byte(b"", random.Random(0), 1), _changed_byte(b"a", random.Random(0), 3)
    (b'', b'b')
    """
    if not data:
        return data
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ bits]) + data[place + 1 :]


def repeated(data: bytes, rng: random.Random) -> Damage:
    return Damage("repeated", data * rng.choice((2, 3, 50)))


PLAIN_WAYS = (random_bytes, truncated, flipped_bit, flipped_byte, repeated)


def is_framed(data: bytes) -> bool:
    """Return whether these bytes are a stored record with a checksum."""
    return data[:2] == b"TS" and len(data) >= _PREFIX.size + _NUM_CRC_BYTES


def forged_field(data: bytes, rng: random.Random) -> Damage:
    header, body = _split(data)
    return Damage("one field forged", _join(data, damaged_message(header, rng), body), True)


def forged_header(data: bytes, rng: random.Random) -> Damage:
    header, body = _split(data)
    other = flipped_byte(header, rng).data
    return Damage("one byte of the header forged", _join(data, other, body), True)


def newer_version(data: bytes, rng: random.Random) -> Damage:
    header, body = _split(data)
    newer = data[:3] + bytes([rng.randrange(2, 256)]) + data[4:]
    return Damage("a newer release", _join(newer, header, body), True)


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
    return rng.choice(PLAIN_WAYS)(value, rng).data


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
