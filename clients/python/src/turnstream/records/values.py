"""Values with named fields as protobuf messages, or as JSON values, and back.

A dataclass or a named tuple has the message of the same name, whose fields have the same names. Its
annotations say how a stored field is read: a missing message field is None where None is allowed.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from google.protobuf.message import DecodeError, Message

from turnstream.errors import CorruptRecordError, RecordError, UnknownFormatError
from turnstream.records.framing import MAJOR_VERSION
from turnstream.wire.v1 import records_pb2 as wire

_Value = TypeVar("_Value")
_Message = TypeVar("_Message", bound=Message)
_Read = Callable[[Any], Any]

UNREADABLE: Final = (
    *(ValueError, TypeError, LookupError, ArithmeticError, AssertionError, AttributeError),
    *(StopIteration, RecursionError, struct.error, zlib.error),
)
"""Errors of parsers that get other bytes than were written."""

_SCALARS: Final = frozenset((int, float, str, bool, bytes, NoneType))


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


def to_message(value: object) -> Any:
    """Return the message of a value."""
    return _converted(value, lambda kind, parts: getattr(wire, kind.__name__)(**parts))


def to_plain(value: object) -> Any:
    """Return a value as a JSON value: objects keyed by the names of their fields."""
    return _converted(value, lambda _, parts: parts)


def read_value(kind: type[_Value], stored: object) -> _Value:
    """Return the value of a message, or of a JSON object.

    Raises:
        UnknownFormatError: a newer release wrote one of its texts.
        TypeError, ValueError, KeyError, AttributeError: it is no value of this kind.
    """
    return _reader(kind)(stored)


def _converted(value: object, make: Callable[[type[Any], dict[str, Any]], Any]) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return value
    if _has_fields(kind):
        parts = {name: getattr(value, name) for name in field_names(kind)}
        for name in _nested(kind):
            parts[name] = _converted(parts[name], make)
        return make(kind, parts)
    if kind in (tuple, set):
        items = cast("Iterable[Any]", value if kind is tuple else sorted(cast("set[Any]", value)))
        return [each if type(each) in _SCALARS else _converted(each, make) for each in items]
    if isinstance(value, dict):
        values = cast("dict[Any, Any]", value)
        if all(isinstance(key, str) for key in values):
            return {name: _converted(each, make) for name, each in values.items()}
        return [[_converted(key, make), _converted(each, make)] for key, each in values.items()]
    return value


@cache
def field_names(kind: type[Any]) -> tuple[str, ...]:
    """Return the fields of a dataclass or a named tuple."""
    return tuple(each.name for each in fields(kind)) if is_dataclass(kind) else kind._fields


@cache
def _nested(kind: type[Any]) -> tuple[str, ...]:
    """Return the fields that may hold more than a number or a text."""
    hints = get_type_hints(kind)
    return tuple(name for name in field_names(kind) if not _is_scalar(hints[name]))


def _is_scalar(hint: Any) -> bool:
    is_union = get_origin(hint) in (Union, UnionType)
    return {*(get_args(hint) if is_union else (hint,))} <= _SCALARS


@cache
def _reader(hint: Any) -> _Read:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        read = _reader(next(each for each in arguments if each is not NoneType))
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


def _reader_of_mapping(key_hint: Any, value_hint: Any) -> _Read:
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


def _reader_of_fields(kind: type[Any]) -> _Read:
    hints = get_type_hints(kind)
    parts = [
        (name, _reader(hints[name]), NoneType in get_args(hints[name]))
        for name in field_names(kind)
    ]

    def read(stored: Any) -> Any:
        if not isinstance(stored, Message):
            return kind(**{name: read(stored[name]) for name, read, _ in parts})
        values = {
            name: read(getattr(stored, name))
            for name, read, may_be_none in parts
            if not may_be_none or stored.HasField(name)
        }
        return kind(**{name: values.get(name) for name, _, _ in parts})

    return read


def _reader_of_scalar(kind: type[Any]) -> _Read:
    kinds = (int, float) if kind is float else (kind,)

    def read(stored: Any) -> Any:
        if not isinstance(stored, kinds) or (isinstance(stored, bool) and kind is not bool):
            raise TypeError(f"{stored!r} is no {kind.__name__}")
        return stored

    return read


def _reader_of_texts(known: Mapping[str, Any]) -> _Read:
    def read(stored: Any) -> Any:
        if stored not in known:
            what = f"the value {stored!r}"
            raise UnknownFormatError("a record", MAJOR_VERSION, MAJOR_VERSION, what)
        return known[stored]

    return read
