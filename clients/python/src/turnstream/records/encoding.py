"""Values as stored records: their messages or JSON values, and the frame around every record.

A dataclass or a named tuple has the message of the same name, whose fields have the same names. Its
annotations say how a stored field is read: a missing message field is None where None is allowed.
The frame is::

    offset  bytes
    0       2      b"TS"
    2       1      kind: b"T" turn, b"E" event, b"M" manifest, b"C" compact record, b"S" snapshot,
                   b"U" compact record of ends, b"V" result of an evaluation; b"L" was a file of
                   compact records that earlier releases wrote
    3       1      major version of this kind: 1 of C and U, of T with token weights, and of E
                   with turns that are left out; 0 of the others
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import (
    Any,
    Final,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from turnstream.errors import CorruptRecordError, RecordError, UnknownFormatError
from turnstream.wire.v1 import records_pb2 as wire

MAJOR_VERSION: Final = 0
"""Version of all kinds except compact records."""

COMPACT_VERSION: Final = 1
"""The only version of compact records that this release reads."""

WEIGHTED_VERSION: Final = 1
"""Version of turns with token weights: an older release would train them without."""

LEFT_OUT_VERSION: Final = 1
"""Version of seals with turns that are left out: an older release would train these turns."""

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
_NEWEST: Final = {**_VERSIONS, TURN: WEIGHTED_VERSION, EVENT: LEFT_OUT_VERSION}
_PREFIX: Final = struct.Struct("<2s1sBI")
_FORMAT_AND_SIZE: Final = struct.Struct("<4sI")
"""The prefix with magic, kind and version in one piece."""
_CRC: Final = struct.Struct("<I")
_WHOLE_CRC: Final = 0x2144DF1C
"""CRC-32 of any bytes that end with their own CRC-32."""
_PADDING: Final = [bytes(-length % 8) for length in range(8)]


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
    parts: list[Any] = [b"".join((prefix, header, _PADDING[len(header) % 8])), *body]
    crc = 0
    for part in parts:  # the CRC of the joined bytes would need a second copy of them
        crc = zlib.crc32(part, crc)
    parts.append(_CRC.pack(crc))
    return b"".join(parts)


def read_frame(record: bytes, *, kind: bytes, is_whole: bool = False) -> Frame:
    """Return the frame of a record after a check of kind, length, checksum and major version.

    `is_whole`: the checksum was checked before.
    """
    name = _NAMES[kind]
    if len(record) < _PREFIX.size + _CRC.size:
        raise CorruptRecordError(f"a {name} record of {len(record)} bytes is cut short")
    magic, found, version, num_header_bytes = _PREFIX.unpack_from(record)
    if magic != b"TS" or found != kind:
        raise CorruptRecordError(f"no {name} record: it begins with {bytes(record[:3])!r}")
    body_stop = len(record) - _CRC.size
    (crc,) = _CRC.unpack_from(record, body_stop)
    if not is_whole and zlib.crc32(record) != _WHOLE_CRC:
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


def check_frames(records: Sequence[bytes], *, kind: bytes) -> list[tuple[int, int]]:
    """Return the major version and the length of the header of each record.

    It refuses what `read_frame` refuses, at a third of the cost. A ValueError names no record. A
    header may leave its record.
    """
    newest = _NEWEST.get(kind, MAJOR_VERSION)
    known = [b"TS" + kind + bytes((version,)) for version in range(newest + 1)]
    if min(map(len, records), default=_PREFIX.size) < _PREFIX.size:
        raise ValueError
    if {*map(zlib.crc32, records)} - {_WHOLE_CRC}:
        raise ValueError
    prefixes = map(_FORMAT_AND_SIZE.unpack_from, records)
    return [(known.index(prefix), num_bytes) for prefix, num_bytes in prefixes]


def check_format(record: str, found: object, *, newest: int, oldest: int = 0) -> None:
    """Refuse a format outside the range of this release; `record` names the stored state."""
    if not isinstance(found, int) or isinstance(found, bool):
        raise CorruptRecordError(f"{record}: its format is {found!r}")
    if not oldest <= found <= newest:
        raise UnknownFormatError(record, found, newest)


def read_header(record: bytes, *, kind: bytes) -> bytes:
    """Return the header of a record without arrays, checked as in `read_frame`."""
    return read_bodiless(record, kind=kind).header


def read_bodiless(record: bytes, *, kind: bytes) -> Frame:
    """Return the frame of a record without arrays, checked as in `read_frame`."""
    frame = read_frame(record, kind=kind)
    if frame.body_start != frame.body_stop:
        raise CorruptRecordError(
            f"{frame.body_stop - frame.body_start} stray bytes in a {_NAMES[kind]} record"
        )
    return frame


_Value = TypeVar("_Value")
_Message = TypeVar("_Message", bound=Message)
_Convert = Callable[[Any], Any]

UNREADABLE: Final = (
    *(ValueError, TypeError, LookupError, ArithmeticError, AssertionError, AttributeError),
    *(StopIteration, RecursionError, struct.error, zlib.error),
)
"""Errors of parsers that get other bytes than were written."""


class reading:  # noqa: N801 - used like a function
    """Raise the error of a parser inside the block, or one of `others`, as a CorruptRecordError."""

    __slots__ = ("_kinds", "_what")

    def __init__(self, what: str, *others: type[Exception]) -> None:
        self._what = what
        self._kinds = (*UNREADABLE, *others) if others else UNREADABLE

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, self._kinds) and not isinstance(error, RecordError):
            raise CorruptRecordError(f"{self._what}: {error!r}") from error


def parse_message(kind: type[_Message], data: bytes) -> _Message:
    """Return the message in these bytes; CorruptRecordError if there is none."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise CorruptRecordError(f"no {kind.__name__} in {len(data)} bytes: {error}") from error


_ADDED: Final = {"is_left_out": False}
"""Fields that JSON values of earlier releases lack; they are missing where they have this value."""


def to_message(value: object) -> Any:
    """Return the message of a value."""
    return _writer(type(value), as_message=True)(value)


def to_plain(value: object) -> Any:
    """Return a value as a JSON value: objects keyed by the names of their fields."""
    return _writer(type(value), as_message=False)(value)


def read_value(kind: type[_Value], stored: object) -> _Value:
    """Return the value of a message, or of a JSON object; UNREADABLE errors if it is none."""
    return _reader(kind)(stored)


@cache
def field_names(kind: type[Any]) -> tuple[str, ...]:
    """Return the fields of a dataclass or a named tuple."""
    return tuple(each.name for each in fields(kind)) if is_dataclass(kind) else kind._fields


@cache
def _writer(hint: Any, *, as_message: bool) -> _Convert:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        write = _writer(_present(arguments), as_message=as_message)
        return write if write is _same else lambda value: None if value is None else write(value)
    if origin in (tuple, set):
        in_order = cast("_Convert", list if origin is tuple else sorted)
        write = _writer(arguments[0], as_message=as_message)
        if origin is tuple and write is _same and as_message:
            return _same
        return in_order if write is _same else lambda values: [*map(write, in_order(values))]
    if origin is not None and origin is not Literal and issubclass(origin, Mapping):
        return _writer_of_mapping(*arguments, as_message=as_message)
    is_one_value = origin is not None or not _has_fields(hint)
    return _same if is_one_value else _writer_of_fields(hint, as_message=as_message)


def _same(value: Any) -> Any:
    return value


def _present(arguments: tuple[Any, ...]) -> Any:
    return next(each for each in arguments if each is not NoneType)


def _writer_of_mapping(key_hint: Any, value_hint: Any, *, as_message: bool) -> _Convert:
    write_key = _writer(key_hint, as_message=as_message)
    write = _writer(value_hint, as_message=as_message)
    if key_hint is str:
        return lambda values: {name: write(each) for name, each in values.items()}
    return lambda values: [[write_key(key), write(each)] for key, each in values.items()]


def _writer_of_fields(kind: type[Any], *, as_message: bool) -> _Convert:
    names, hints = field_names(kind), get_type_hints(kind)
    writers = [(name, _writer(hints[name], as_message=as_message)) for name in names]
    nested = [(name, write) for name, write in writers if write is not _same]
    make: Any = getattr(wire, kind.__name__) if as_message else dict
    added = [] if as_message else [name for name in names if name in _ADDED]

    def write(value: Any) -> Any:
        parts = {name: getattr(value, name) for name in names}
        for name, write_part in nested:
            parts[name] = write_part(parts[name])
        for name in added:
            if parts[name] == _ADDED[name]:
                del parts[name]
        return make(**parts)

    return write


@cache
def _reader(hint: Any) -> _Convert:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        read = _reader(_present(arguments))
        return lambda stored: None if stored is None else read(stored)
    if origin in (tuple, set):
        read = _reader(arguments[0])
        return lambda stored: cast("Any", origin)([read(each) for each in stored])
    if origin is not None and origin is not Literal and issubclass(origin, Mapping):
        return _reader_of_mapping(*arguments)
    if origin is Literal:
        return _reader_of_texts({text: text for text in arguments})
    if issubclass(hint, StrEnum):
        return _reader_of_texts({each.value: each for each in hint})
    return _reader_of_fields(hint) if _has_fields(hint) else _reader_of_scalar(hint)


def _reader_of_mapping(key_hint: Any, value_hint: Any) -> _Convert:
    read_key, read = _reader(key_hint), _reader(value_hint)

    def read_mapping(stored: Any) -> dict[Any, Any]:
        if key_hint is not str:
            return {read_key(key): read(each) for key, each in stored}
        names: list[str] = [*stored] if isinstance(stored, dict) else sorted(stored.keys())
        return {name: read(stored[name]) for name in names}

    return read_mapping


@cache
def _has_fields(kind: type[Any]) -> bool:
    return is_dataclass(kind) or hasattr(kind, "_fields")


def _reader_of_fields(kind: type[Any]) -> _Convert:
    hints = get_type_hints(kind)
    parts = [
        (name, _reader(hints[name]), NoneType in get_args(hints[name]))
        for name in field_names(kind)
    ]
    missing = {name: _ADDED[name] for name, *_ in parts if name in _ADDED}

    def read(stored: Any) -> Any:
        if not isinstance(stored, Message):
            given = {**missing, **stored} if missing else stored
            return kind(**{name: read(given[name]) for name, read, _ in parts})
        values = {
            name: read(getattr(stored, name))
            for name, read, may_be_none in parts
            if not may_be_none or stored.HasField(name)
        }
        return kind(**{name: values.get(name) for name, _, _ in parts})

    return read


def _reader_of_scalar(kind: type[Any]) -> _Convert:
    kinds = (int, float) if kind is float else (kind,)

    def read(stored: Any) -> Any:
        if not isinstance(stored, kinds) or (isinstance(stored, bool) and kind is not bool):
            raise TypeError(f"{stored!r} is no {kind.__name__}")
        return stored

    return read


def _reader_of_texts(known: Mapping[str, Any]) -> _Convert:
    def read(stored: Any) -> Any:
        if stored not in known:
            if not stored:  # a field that no release leaves empty
                raise ValueError("a text is empty")
            what = f"the value {stored!r}"
            raise UnknownFormatError("a record", MAJOR_VERSION, MAJOR_VERSION, what)
        return known[stored]

    return read
