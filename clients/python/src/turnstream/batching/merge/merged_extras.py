"""Extra columns of merged rows, and of whole turns, from the stored parts of turns."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.config.declarations import (
    field_of,
    filled,
    no_values,
    require_values,
)
from turnstream.batching.merge.buffers import offsets_of
from turnstream.batching.merge.columns import MergedTurns, whole_pieces
from turnstream.errors import InvalidTurnError
from turnstream.types import (
    DeclaredColumn,
    ExtraColumn,
    ExtraPiece,
    Ragged,
    StoredTurn,
    StoredTurns,
)
from turnstream.types.extras import ROUTE_DTYPES, num_values


def merged_columns(
    merged: MergedTurns, declared: Sequence[DeclaredColumn]
) -> dict[str, ExtraColumn]:
    """Return every declared column of these rows, in order of name; others are ignored."""
    columns: dict[str, ExtraColumn] = {}
    for column in declared:
        pieces = [_row_pieces(merged, row, column) for row in range(len(merged.rows))]
        offsets = offsets_of([sum(map(len, of_row)) for of_row in pieces])
        values = np.concatenate([no_values(column), *itertools.chain.from_iterable(pieces)])
        columns[column.name] = ExtraColumn(per=column.per, values=Ragged(values, offsets))
    return columns


def whole_extras(
    stored: Sequence[StoredTurn], declared: Sequence[DeclaredColumn]
) -> list[dict[str, NDArray[Any]]]:
    """Return the extra columns of every turn with the values that it shares.

    A turn that left an optional column out has none of it. Turns that share its tokens have the
    fill there, as a row has.
    """
    columns = StoredTurns.of(stored)
    return [
        {
            column.name: np.concatenate(_turn_pieces(columns, number, column)).astype(column.dtype)
            for column in declared
            if column.name in turn.extras or not column.is_optional
        }
        for number, turn in enumerate(stored)
    ]


def _row_pieces(merged: MergedTurns, row: int, column: DeclaredColumn) -> list[NDArray[Any]]:
    """Return the values of the row in the column, in order."""
    stored, turns = merged.stored, merged.rows[row]
    if column.per == "row":
        return [_agreed_value(stored, turns, column)]
    if column.per != "response_token":
        return _turn_pieces(stored, turns[-1], column)
    pieces: list[NDArray[Any]] = []
    last = 0
    for turn, (begin, end) in zip(turns, merged.spans_of(row), strict=True):
        if begin > last:
            pieces.append(filled(column, begin - last))
        pieces += _turn_pieces(stored, turn, column)
        last = end
    return pieces


def _agreed_value(
    stored: StoredTurns, turns: Sequence[int], column: DeclaredColumn
) -> NDArray[Any]:
    first, *others = turns
    value = np.concatenate(_turn_pieces(stored, first, column))
    for other in others:
        found = np.concatenate(_turn_pieces(stored, other, column))
        if found.tobytes() != value.tobytes():
            raise InvalidTurnError(
                field_of(column),
                f"differs between turns {first} and {other}, which make one row: it has one value "
                "per row",
            )
    return value


def _turn_pieces(stored: StoredTurns, turn: int, column: DeclaredColumn) -> list[NDArray[Any]]:
    """Return all values of a turn in a column, its parents' part first, as views."""
    own = functools.partial(own_piece, stored, column=column)
    return whole_pieces(stored, turn, own, field=field_of(column))


def own_piece(stored: StoredTurns, turn: int, *, column: DeclaredColumn) -> ExtraPiece:
    """Return the values of a column in a stored turn, or the default."""
    num_response, shared_tokens = stored.num_response_tokens[turn], stored.shared_tokens[turn]
    num_prompt = shared_tokens + len(stored.token_ids[turn]) - num_response
    piece = stored.extras[turn].get(column.name)
    if piece is None:
        count = num_values(
            column.per, num_tokens=num_prompt + num_response, num_response=num_response
        )
        if count != 0 and column.per != "items" and not column.is_optional:
            raise InvalidTurnError(field_of(column), f"turn {turn} has none")
        if not count:
            return ExtraPiece(0, no_values(column))
        num_shared = shared_tokens if column.per == "token" else 0
        return ExtraPiece(num_shared, filled(column, count - num_shared))
    require_values(
        column,
        piece.values,
        num_prompt=num_prompt,
        num_response=num_response,
        num_shared=piece.num_shared,
        narrower=ROUTE_DTYPES if column.per == "first_tokens" else (),
    )
    return piece
