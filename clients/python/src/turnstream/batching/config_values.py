"""Single values of a configuration: checked, and in the one form that is stored."""

from __future__ import annotations

import math
from typing import Any, cast

from turnstream.errors import InvalidConfigError

_LONGEST_S = 30 * 86_400.0  # what is longer is a mistake in the unit


def require_at_least(value: object, least: int, *, field: str) -> None:
    """Refuse what is no whole number, or too small a one.

    Raises:
        InvalidConfigError: names the field and the value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidConfigError(field, f"{value!r} is not a whole number of at least {least}")


def checked_seconds(value: Any, *, least_s: float, field: str) -> float:
    """A number of seconds from `least_s` to 30 days.

    Raises:
        InvalidConfigError: names the field and the value.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least_s <= value <= _LONGEST_S:
        raise InvalidConfigError(
            field, f"{value!r} is not a number of seconds from {least_s:g} to {_LONGEST_S:g}"
        )
    return float(value)


def checked_cost(value: object, *, field: str) -> float:
    """A factor of what a forward pass costs.

    Raises:
        InvalidConfigError: names the field and the value.
    """
    return checked_factor(value, most=1e12, field=field)


def checked_factor(value: object, *, most: float, field: str) -> float:
    """A number from 0 to `most`.

    Raises:
        InvalidConfigError: names the field and the value.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise InvalidConfigError(field, f"{value!r} is not a number from 0 to {most:g}")
    return float(value)


def checked_weights(given: object) -> tuple[tuple[str, float], ...]:
    """Pairs of name and weight in order of name, also from the lists that JSON makes of them.

    Raises:
        InvalidConfigError: shows what was given.
    """
    try:
        pairs = [(name, float(weight)) for name, weight in cast("Any", given)]
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidConfigError(
            "component_weights", f"{given!r} is not a list of (name, weight)"
        ) from error
    for name, weight in pairs:
        if not isinstance(name, str) or not name or not math.isfinite(weight):
            raise InvalidConfigError("component_weights", f"{(name, weight)!r} in {given!r}")
    if len({name for name, _ in pairs}) < len(pairs):
        raise InvalidConfigError("component_weights", f"a name comes twice in {given!r}")
    return tuple(sorted(pairs))
