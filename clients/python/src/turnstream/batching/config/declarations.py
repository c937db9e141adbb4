"""Extra columns as a run declares them, and the check of a turn against that.

Names, types, shapes and counts are checked; values are never read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from turnstream.errors import InvalidConfigError, InvalidTurnError
from turnstream.types import DeclaredColumn
from turnstream.types.extras import ROUTE_DTYPES


def checked_declarations(given: object, *, merge: bool) -> tuple[DeclaredColumn, ...]:
    """Return the declarations in order of name, also from the objects of stored JSON."""
    try:
        columns = [_declaration(one) for one in cast("Any", given)]
    except TypeError as error:
        raise InvalidConfigError(
            "extra_columns", f"{given!r} is not a list of declarations: {error}"
        ) from error
    columns.sort(key=lambda column: column.name)
    names = [column.name for column in columns]
    for name in names:
        if names.count(name) > 1:
            raise InvalidConfigError("extra_columns", f"{name!r} is declared twice")
    for column in columns:
        if merge and column.per == "row" and not column.is_constant:
            raise InvalidConfigError(
                f"extra_columns[{column.name!r}].is_constant",
                "False does not go with merge=True: turns that make one row may differ, and a row "
                "has one value",
            )
    return tuple(columns)


def _declaration(given: object) -> DeclaredColumn:
    if isinstance(given, DeclaredColumn):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(f"{given!r} is no declaration")
    return DeclaredColumn(**cast("Mapping[str, Any]", given))


def require_declared(
    extras: Mapping[str, NDArray[Any]],
    declared: Sequence[DeclaredColumn],
    *,
    num_prompt: int,
    num_response: int,
) -> None:
    """Refuse extra columns of a turn that are not exactly as declared; values are not read."""
    names = [column.name for column in declared]
    for name in extras:
        if name not in names:
            known = f"only {', '.join(names)}" if names else "no extra column"
            raise InvalidTurnError(f"extras[{name!r}]", f"the run declares {known}")
    for column in declared:
        values = extras.get(column.name)
        if values is None:
            if not column.is_optional and column.per != "items":
                raise InvalidTurnError(field_of(column), "is missing, and not declared optional")
            continue
        if values.dtype != column.numpy_dtype or values.shape[1:] != column.shape:
            raise InvalidTurnError(
                field_of(column),
                f"{values.dtype}{list(values.shape)} is not {column.dtype}[n{shape_of(column)}]",
            )
        require_length(column, len(values), num_prompt=num_prompt, num_response=num_response)


def require_length(
    column: DeclaredColumn, num_values: int, *, num_prompt: int, num_response: int
) -> None:
    """Refuse another number of values than a turn of these lengths has of the column."""
    num_tokens = num_prompt + num_response
    match column.per:
        case "token":
            least = most = num_tokens
            what = f"{num_prompt} prompt and {num_response} response tokens"
        case "first_tokens":
            least, most, what = 1, num_tokens, f"1 to {num_tokens} first tokens"
        case "response_token":
            least = most = num_response
            what = f"{num_response} response tokens"
        case "row":
            least, most, what = 1, 1, "the turn, which has one"
        case "items":
            return
    if not least <= num_values <= most:
        raise InvalidTurnError(field_of(column), f"has {num_values} values for {what}")


def filled(column: DeclaredColumn, count: int) -> NDArray[Any]:
    """Return `count` times the value of the column that stands for a missing one."""
    return np.full((count, *column.shape), column.fill, column.dtype)


def no_values(column: DeclaredColumn) -> NDArray[Any]:
    """Return no value in the type of the column, of router choices in the narrowest."""
    dtype = ROUTE_DTYPES[0] if column.per == "first_tokens" else column.dtype
    return np.empty((0, *column.shape), dtype)


def field_of(column: DeclaredColumn) -> str:
    """Return the name of the column in errors."""
    return f"extras[{column.name!r}]"


def shape_of(column: DeclaredColumn) -> str:
    """Return the shape of one value as errors write it after the number of values: ", 2, 3"."""
    return "".join(f", {size}" for size in column.shape)
