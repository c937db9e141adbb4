"""Validation of extra columns.

Pure functions. Every error names the column, the value and its position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.config.declarations import require_declared
from turnstream.errors import InvalidTurnError
from turnstream.generator.encode.checks import as_array
from turnstream.types import DeclaredColumn, Turn
from turnstream.types.names import shown
from turnstream.types.scalars import named_values

_KINDS = {"u": "biu", "i": "biu", "f": "iuf"}
"""Kinds of numbers that a column of whole numbers, and of floats, takes."""


def with_checked_extras(
    turn: Turn, extras: Mapping[str, Any] | None, declared: Sequence[DeclaredColumn]
) -> Turn:
    """Return the turn with these columns, as arrays of the declared types and shapes.

    Args:
        turn: checked, without extra columns.
        extras: lists, numpy arrays or torch tensors by name; None for a missing column.
        declared: columns of the run.

    Raises:
        InvalidTurnError: names the column and the defect.
    """
    named = named_values(extras, field="extras")
    if not declared and not named:
        return turn
    given = {name: values for name, values in named.items() if values is not None}
    columns = {column.name: column for column in declared}
    arrays = {
        name: _checked(columns[name], values) if name in columns else np.empty(0)
        for name, values in given.items()
    }
    checked = replace(turn, extras=dict(sorted(arrays.items())))
    require_declared(checked, declared)
    return checked


def _checked(column: DeclaredColumn, values: Any) -> NDArray[Any]:
    field = f"extras[{column.name!r}]"
    array = as_array(values, field=field)
    if column.per == "row" and array.shape == column.shape:
        array = array[None]
    if array.shape == (0,):  # a list without elements says nothing of their type and shape
        array = np.empty((0, *column.shape), column.dtype)
    if array.ndim != 1 + len(column.shape) or array.shape[1:] != column.shape:
        expected = ", ".join(["n", *map(str, column.shape)])
        message = f"has the shape {array.shape}, not ({expected}): {shown(values)}"
        raise InvalidTurnError(field, message)
    if array.dtype.kind not in _KINDS[column.numpy_dtype.kind]:
        message = f"are numbers for {column.dtype}, not {array.dtype}: {shown(values)}"
        raise InvalidTurnError(field, message)
    if column.numpy_dtype.kind == "f":
        return _as_floats(array, column, field=field)
    return _as_integers(array, column, field=field)


def _as_floats(array: NDArray[Any], column: DeclaredColumn, *, field: str) -> NDArray[Any]:
    with np.errstate(over="ignore"):  # too large values become infinite, and are refused
        floats = array.astype(column.dtype, copy=False)
    is_finite = np.isfinite(floats)
    if not is_finite.all():
        raise _at_first(array, ~is_finite, f"is not a finite {column.dtype}", field=field)
    return floats


def _as_integers(array: NDArray[Any], column: DeclaredColumn, *, field: str) -> NDArray[Any]:
    limits = np.iinfo(column.dtype)
    least = 0 if column.per == "first_tokens" else limits.min
    if array.size and not (least <= int(array.min()) and int(array.max()) <= limits.max):
        wrong = np.array([not least <= int(one) <= limits.max for one in array.flat])
        what = "an expert" if column.per == "first_tokens" else f"an {column.dtype}"
        message = f"is not {what} ({least} to {limits.max})"
        raise _at_first(array, wrong.reshape(array.shape), message, field=field)
    return array.astype(column.dtype, copy=False)


def _at_first(
    array: NDArray[Any], wrong: NDArray[np.bool_], message: str, *, field: str
) -> InvalidTurnError:
    place = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    where = ", ".join(str(int(index)) for index in place)
    return InvalidTurnError(field, f"{array[place].item()!r} at [{where}] {message}")
