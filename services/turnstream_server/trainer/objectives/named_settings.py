"""Settings as a user types them: `NAME` or `NAME:key=value,key=value`.

A dataclass declares the keys of a name, with their types, defaults and bounds. Without torch, so
that the command line answers at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from turnstream.errors import InvalidConfigError

Named = TypeVar("Named", bound="NamedSettings")


def bounded(
    default: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> Any:
    """Return a field of a number with this default and these bounds."""
    bounds = {"at_least": at_least, "above": above, "at_most": at_most}
    return field(default=default, metadata=bounds)


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
            value = getattr(self, each.name)
            if isinstance(value, float | int):
                self._check(each.name, value, **each.metadata)

    def _check(
        self,
        key: str,
        value: float,
        *,
        at_least: float | None = None,
        above: float | None = None,
        at_most: float | None = None,
    ) -> None:
        if at_least is not None and not value >= at_least:
            raise self.refusal(f"{key}={value:g} is below {at_least:g}")
        if above is not None and not value > above:
            raise self.refusal(f"{key}={value:g} is not above {above:g}")
        if at_most is not None and not value <= at_most:
            raise self.refusal(f"{key}={value:g} is above {at_most:g}")
        if math.isnan(value):
            raise self.refusal(f"{key}=nan is no number")

    def refuse_empty_range(self, low: float | None, high: float | None) -> None:
        """Raise InvalidConfigError if nothing is between these bounds; None is no bound."""
        if low is not None and high is not None and low > high:
            raise self.refusal(f"low={low:g} is above high={high:g}")

    def refusal(self, message: str) -> InvalidConfigError:
        """Return the error with this message, for the option and the name."""
        return InvalidConfigError(self.option, f"{self.name}: {message}")

    def parameters(self) -> dict[str, Any]:
        """Return key to value, with the defaults."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

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
