"""Checks of single values that callers pass: numbers, flags, and names with values."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from turnstream.errors import InvalidConfigError, InvalidTurnError
from turnstream.types.names import checked_text, quoted

MAX_SECONDS = 1e9
"""Longest timeout, about 30 years: the clocks of threads count no further."""

_Refusal = type[InvalidTurnError] | type[InvalidConfigError]


def finite_number(value: Any, *, field: str, refusal: _Refusal = InvalidTurnError) -> float:
    """Return a number as a finite float; numpy scalars and torch scalars are numbers too.

    Every check of this module raises an error of type `refusal`, which names field and value.
    """
    if type(value) is float and math.isfinite(value):  # most values
        return value
    if isinstance(value, str | bytes | bytearray):  # float() would parse them
        raise refusal(field, f"{quoted(value)} is not a number")
    try:
        number = float(out_of_its_graph(value))
    except (TypeError, ValueError) as error:
        raise refusal(field, f"{quoted(value)} is not a number") from error
    except OverflowError as error:
        raise refusal(field, f"{quoted(value)} is not finite as a float") from error
    if not math.isfinite(number):
        raise refusal(field, f"{number!r} is not finite")
    return number


def whole_number(
    value: Any,
    *,
    field: str,
    least: int = 0,
    limit: int,
    refusal: _Refusal = InvalidTurnError,
) -> int:
    """Return a whole number from `least` to `limit` - 1 as an int; booleans are not numbers."""
    try:
        number = operator.index(value)
    except TypeError as error:
        raise refusal(field, f"{quoted(value)} is not a whole number") from error
    if not least <= number < limit or isinstance(value, bool):
        raise refusal(field, f"{quoted(value)} is not a whole number from {least} to {limit - 1}")
    return number


def flag(value: Any, *, field: str) -> bool:
    """Return True or False, also of numpy."""
    if not isinstance(value, bool | np.bool_):
        raise InvalidTurnError(field, f"{quoted(value)} is neither True nor False")
    return bool(cast("bool", value))


def seconds(value: Any, *, field: str, least: float = -MAX_SECONDS) -> float:
    """Return a timeout in seconds; InvalidConfigError if it is not from `least` to MAX_SECONDS."""
    is_flag = isinstance(value, bool | np.bool_)
    number = math.nan if is_flag else finite_number(value, field=field, refusal=InvalidConfigError)
    if not least <= number <= MAX_SECONDS:
        raise InvalidConfigError(
            field, f"{quoted(value)} is not a number of seconds from {least:g} to {MAX_SECONDS:g}"
        )
    return number


def timeout(value: Any, *, field: str) -> float | None:
    """Return a timeout in seconds, or None for no timeout."""
    return None if value is None else seconds(value, field=field)


def named_values(values: Any, *, field: str) -> dict[str, Any]:
    """Return a mapping whose keys are texts as a dict; None has no names."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise InvalidTurnError(field, f"{quoted(values)} is not a mapping of names to values")
    given = cast("Mapping[Any, Any]", values)
    return {checked_text(name, field=field): given[name] for name in given}


def named_numbers(values: Any, *, field: str) -> dict[str, float]:
    """Return a mapping of texts to finite numbers as a dict, sorted by key."""
    given = named_values(values, field=field)
    return {name: finite_number(given[name], field=f"{field}[{name!r}]") for name in sorted(given)}


def out_of_its_graph(values: Any) -> Any:
    """Return a torch tensor as numpy can take it, and any other value as it is.

    Torch is not imported. Rewards come from reward models, often in bfloat16 and with a graph
    that is not wanted.
    """
    if not callable(getattr(values, "detach", None)):
        return values
    tensor = values.detach().cpu()
    # numpy has no bfloat16.
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor
