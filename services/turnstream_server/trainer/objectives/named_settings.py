"""Settings as a user types them: `NAME` or `NAME:key=value,key=value`.

A dataclass declares the keys of a name, with their types, defaults and bounds. Without torch, so
that the command line answers at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import (
    Any,
    ClassVar,
    Final,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from turnstream.errors import InvalidConfigError

Named = TypeVar("Named", bound="NamedSettings")

LARGEST: Final = 1e9
"""Bound of a number without another one: its products stay within float32."""


class Bounds(NamedTuple):
    """The numbers that a parameter may have.

    Attributes:
        at_least, at_most: included. Infinity is a number only if `at_most` is infinity.
        above: not included; None for no such bound.
        reason: added to the error, after a colon; empty for none.
    """

    at_least: float = -LARGEST
    at_most: float = LARGEST
    above: float | None = None
    reason: str = ""

    def problem(self, value: float) -> str | None:
        """Return the bound that a number breaks; None if it is inside.

        >>> Bounds(at_least=0, reason="a loss is positive").problem(-1)
        '-1 is below 0: a loss is positive'
        """
        broken: str | None = None
        if math.isnan(value):
            return "nan is no number"
        if value < self.at_least:
            broken = f"{value:g} is below {self.at_least:g}"
        if self.above is not None and value <= self.above:
            broken = f"{value:g} is not above {self.above:g}"
        if value > self.at_most:
            broken = f"{value:g} is above {self.at_most:g}"
        return f"{broken}: {self.reason}" if broken and self.reason else broken


def bounded(default: float | None, **bounds: Any) -> Any:
    """Return a field of a number with this default and these `Bounds`."""
    return field(default=default, metadata={"bounds": Bounds(**bounds)})


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSettings:
    """The parameters of one name of an option. `str` returns the text that a user types.

    Attributes:
        option: command-line option that takes the name.
        name: as typed.

    Raises:
        InvalidConfigError: a number is outside its bounds. It names option, name, key and value.
    """

    option: ClassVar[str]
    name: ClassVar[str]

    def __post_init__(self) -> None:
        for each in fields(self):
            value, bounds = getattr(self, each.name), each.metadata.get("bounds")
            if bounds is not None and value is not None and (problem := bounds.problem(value)):
                raise self.refusal(f"{each.name}={problem}")

    def refusal(self, message: str) -> InvalidConfigError:
        """Return the error with this message, for the option and the name."""
        return InvalidConfigError(self.option, f"{self.name}: {message}")

    def parameters(self) -> dict[str, Any]:
        """Return key to value, with the defaults."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def default_of(self, key: str) -> Any:
        """Return the default of a parameter."""
        return next(each.default for each in fields(self) if each.name == key)

    def __str__(self) -> str:
        changed = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if getattr(self, each.name) != each.default
        }
        written = ",".join(f"{key}={_written(value)}" for key, value in changed.items())
        return f"{self.name}:{written}" if written else self.name


def parse_named(text: str, known: Mapping[str, type[Named]], *, option: str) -> Named:
    """Return the settings that a text stands for.

    Args:
        text: `NAME` or `NAME:key=value,key=value`. The value "none" stands for None.
        known: name to dataclass.
        option: named in errors.

    Raises:
        InvalidConfigError: the name, a key or a value is not known; names those that are.
    """
    name, _, words = text.partition(":")
    if name not in known:
        raise InvalidConfigError(option, f"{name!r} is not one of {', '.join(known)}")
    return parse_parameters(words, known[name], option=option)


def parse_parameters(words: str, kind: type[Named], *, option: str) -> Named:
    """Return the settings of `key=value,key=value`; see `parse_named`."""
    name = kind.name
    pairs = [word.partition("=") for word in words.split(",")] if words else []
    values: dict[str, Any] = {}
    for key, _, written in pairs:
        if key in values:
            raise InvalidConfigError(option, f"{name}: {key} is set twice")
        values[key] = _parsed(key, written, kind=kind, where=(option, name))
    return kind(**values)


def _parsed(key: str, written: str, *, kind: type[NamedSettings], where: tuple[str, str]) -> Any:
    """Return the value of a key in the type of its field."""
    option, name = where
    hints = {each.name: get_type_hints(kind)[each.name] for each in fields(kind)}
    if key not in hints:
        names = ", ".join(hints) or "none"
        raise InvalidConfigError(option, f"{name}: {key!r} is no parameter; parameters: {names}")
    hint = hints[key]
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    if choices:
        if written not in choices:
            message = f"{name}: {key}={written!r} is not one of {', '.join(choices)}"
            raise InvalidConfigError(option, message)
        return written
    if written == "none" and NoneType in get_args(hint):
        return None
    try:
        return float(written)
    except ValueError:
        raise InvalidConfigError(option, f"{name}: {key}={written!r} is no number") from None


def _written(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.12g}" if isinstance(value, float) else str(value)
