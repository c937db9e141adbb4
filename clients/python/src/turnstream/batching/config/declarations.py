"""Extra columns as a run declares them, and the check of a turn against that.

Names, types, shapes and counts are checked; values are never read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.config.values import checked_objects
from turnstream.errors import InvalidConfigError, InvalidTurnError
from turnstream.types import DeclaredColumn
from turnstream.types.extras import ROUTE_DTYPES


def checked_declarations(given: object, *, merge: bool) -> tuple[DeclaredColumn, ...]:
    """Return the declarations in order of name, also from the objects of stored JSON."""
    columns = checked_objects(given, DeclaredColumn, field="extra_columns", noun="declaration")
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
        require_values(column, values, num_prompt=num_prompt, num_response=num_response)


def require_values(
    column: DeclaredColumn,
    values: NDArray[Any],
    *,
    num_prompt: int,
    num_response: int,
    num_shared: int = 0,
    narrower: Collection[str] = (),
) -> None:
    """Refuse values of a turn with these lengths that are not as the column is declared.

    Earlier turns have `num_shared` values before these. The types `narrower` are allowed too.
    """
    is_type = values.dtype == column.numpy_dtype or values.dtype.name in narrower
    if not is_type or values.shape[1:] != column.shape:
        sizes = "".join(f", {size}" for size in column.shape)
        raise InvalidTurnError(
            field_of(column),
            f"{values.dtype}{list(values.shape)} is not {column.dtype}[n{sizes}]",
        )
    num_values = num_shared + len(values)
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
