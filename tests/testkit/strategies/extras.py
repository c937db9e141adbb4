"""Extra columns: declarations, and turns that bring them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from turnstream.types import DeclaredColumn, Extent, Turn
from turnstream.types.extras import EXTRA_DTYPES, ROUTE_DTYPES

_SMALL = st.integers(0, 3)


@st.composite
def declared_columns(draw: st.DrawFn, *, merge: bool = True) -> tuple[DeclaredColumn, ...]:
    """Declared columns, sorted; constant values per row in a run that merges turns."""
    names = draw(st.sets(st.sampled_from(["images", "positions", "routes", "teacher"])))
    columns: list[DeclaredColumn] = []
    for name in sorted(names):
        extent: Extent = draw(st.sampled_from(get_args(Extent)))
        is_routes = extent == "first_tokens"
        columns.append(
            DeclaredColumn(
                name=name,
                per=extent,
                dtype=draw(st.sampled_from(ROUTE_DTYPES if is_routes else EXTRA_DTYPES)),
                shape=draw(st.sampled_from([(1, 2), (2, 3)] if is_routes else [(), (2,), (2, 3)])),
                fill=0 if is_routes else draw(_SMALL),
                is_optional=draw(st.booleans()),
                is_constant=extent == "row" and (merge or draw(st.booleans())),
            )
        )
    return tuple(columns)


@st.composite
def with_extras(
    draw: st.DrawFn,
    turns: Sequence[Turn],
    declared: Sequence[DeclaredColumn],
    *,
    agrees: bool = False,
) -> tuple[Turn, ...]:
    """The same turns with the columns that a run declares, the optional ones left out of some.

    With `agrees`, turns with the same tokens say the same of them, and each captured all of its
    tokens or all but the last; nothing is left out.
    """
    given: list[dict[str, NDArray[Any]]] = []
    for turn in turns:
        extras: dict[str, NDArray[Any]] = {}
        for column in declared:
            if column.is_optional and not agrees and draw(st.booleans()):
                continue
            if column.per == "row" and column.is_constant and given:
                first = given[0].get(column.name)
                if first is not None:
                    extras[column.name] = first
                continue
            extras[column.name] = draw(_values(column, turn, given, agrees=agrees))
        given.append(extras)
    return tuple(replace(turn, extras=extras) for turn, extras in zip(turns, given, strict=True))


@st.composite
def _values(
    draw: st.DrawFn,
    column: DeclaredColumn,
    turn: Turn,
    earlier: Sequence[dict[str, NDArray[Any]]],
    *,
    agrees: bool,
) -> NDArray[Any]:
    num_response = len(turn.response_ids)
    num_tokens = len(turn.prompt_ids) + num_response
    match column.per:
        case "items":
            return draw(_items(column, earlier))
        case "row":
            return draw(_numbers(column, 1))
        case "response_token":
            return draw(_numbers(column, num_response))
        case "token":
            count = num_tokens
        case "first_tokens":
            # All that a turn has not sampled went through the model.
            least = num_tokens - (num_response > 0)
            count = draw(st.integers(max(1, least) if agrees else 1, num_tokens))
    if agrees:
        return _of_tokens(column, np.concatenate([turn.prompt_ids, turn.response_ids])[:count])
    return draw(_numbers(column, count))


@st.composite
def _items(
    draw: st.DrawFn, column: DeclaredColumn, earlier: Sequence[dict[str, NDArray[Any]]]
) -> NDArray[Any]:
    """Those of an earlier turn, or a part of them, and new ones."""
    seen = [extras[column.name] for extras in earlier if column.name in extras]
    known = draw(st.sampled_from(seen)) if seen else np.zeros((0, *column.shape), column.dtype)
    kept = draw(st.sampled_from([len(known), len(known), draw(st.integers(0, len(known)))]))
    return np.concatenate([known[:kept], draw(_numbers(column, draw(st.integers(0, 2))))])


@st.composite
def _numbers(draw: st.DrawFn, column: DeclaredColumn, count: int) -> NDArray[Any]:
    """Small numbers; among router choices some that need two bytes, where the type has them."""
    shape = (count, *column.shape)
    first, factor = draw(st.tuples(_SMALL, _SMALL))  # and not number by number, which takes long
    numbers = (first + factor * np.arange(int(np.prod(shape)))) % 5
    if column.per == "first_tokens" and column.dtype != "uint8" and first == 3:
        numbers *= 100
    return numbers.astype(column.dtype).reshape(shape)


def _of_tokens(column: DeclaredColumn, token_ids: NDArray[np.int32]) -> NDArray[Any]:
    """Numbers that follow from the token and its place."""
    numbers = (token_ids * 7 + np.arange(len(token_ids))) % 100
    spread = np.arange(int(np.prod(column.shape)))
    return (numbers[:, None] + spread).astype(column.dtype).reshape(-1, *column.shape)
