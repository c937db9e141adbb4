"""Stored bytes that cannot be read: an error that names their key and field."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple, TypeVar

from turnstream.errors import (
    CorruptRecordError,
    InvalidConfigError,
    RejectedError,
    UnknownFormatError,
)
from turnstream.records.encoding import UNREADABLE
from turnstream.store.client.keys import readable_name

_T = TypeVar("_T")

_MAX_SHOWN: Final = 200
"""Characters of a cause that are shown: a parser may quote all that it was given."""


@contextlib.contextmanager
def reading(key: str, field: str = "") -> Iterator[None]:
    """Raise unreadable values inside the block as damage of this key and field."""
    try:
        yield
    except UnknownFormatError:
        raise  # a newer release wrote it; it is not damaged
    except (CorruptRecordError, InvalidConfigError, *UNREADABLE) as error:
        raise damaged(key, field, error) from error
    except RejectedError as error:
        if "WRONGTYPE" not in str(error):
            raise
        raise damaged(key, "", "it is a key of another type") from error


def damaged(key: str, field: str, cause: object) -> CorruptRecordError:
    """Return the error of a field that cannot be read; one that names its key stays as it is."""
    if isinstance(cause, DamagedFieldError):
        return cause
    why = cause
    if isinstance(cause, KeyError):
        why = f"{cause} is missing"
    elif isinstance(cause, Exception) and not isinstance(cause, ValueError):
        why = f"{type(cause).__name__}: {cause}"
    place = f"{key}, field {readable_name(field)!r}" if field else key
    shown = " ".join(str(why).split())[:_MAX_SHOWN]
    return DamagedFieldError(f"damaged: {place}: {shown}")


class DamagedFieldError(CorruptRecordError):
    """A field of the store that cannot be read. Names its key."""


class StoredHash(NamedTuple):
    """The fields of the hash `key`, parsed one by one."""

    key: str
    fields: Mapping[bytes, bytes]

    def parsed(self, name: str, parse: Callable[[bytes], _T], default: _T) -> _T:
        """Return a field, or the default where it is missing."""
        value = self.fields.get(name.encode())
        if value is None:
            return default
        with reading(self.key, name):
            return parse(value)

    def number(self, name: str) -> int:
        """Return a whole number; 0 where the field is missing."""
        return self.parsed(name, parsed_number, 0)

    def text(self, name: str) -> str:
        """Return a text; empty where the field is missing."""
        return self.parsed(name, bytes.decode, "")

    def needed(self, name: str, parse: Callable[[bytes], _T]) -> _T:
        """Return a field that is always there."""
        value = self.fields.get(name.encode())
        if value is None:
            raise damaged(self.key, name, "it is missing")
        with reading(self.key, name):
            return parse(value)


def parsed_number(value: bytes) -> int:
    """Return a whole number as scripts write it.

    >>> parsed_number(b"-12")
    -12
    """
    digits = value.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > 19:
        raise ValueError(f"{value[:40]!r} is not a whole number")
    return int(value)
