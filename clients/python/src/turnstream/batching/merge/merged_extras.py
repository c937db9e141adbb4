"""Extra columns of rows: put together from the stored parts of their turns, and cut again.

Router choices are columns of extent "first_tokens". Where none was captured, layouts write the
dummy choice 0, 1 .. topk-1, whose experts are distinct, as kernels require, and mark those slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.config.declarations import field_of, filled, no_values, shape_of
from turnstream.batching.merge.buffers import offsets_of
from turnstream.errors import InvalidTurnError, UnmergeableColumnError
from turnstream.types import (
    DeclaredColumn,
    ExtraColumn,
    ExtraPiece,
    Ragged,
    SequenceColumn,
    StoredTurn,
)
from turnstream.types.extras import ROUTE_DTYPES


class MergedRow(NamedTuple):
    """One row, by the stored form of its turns.

    Attributes:
        stored: all turns of its trajectory.
        turns: indices of the merged turns, each the parent of the next.
        spans: begin and end of every turn's own response, counted in response tokens.
        num_tokens: tokens of prompt and response.
    """

    stored: Sequence[StoredTurn]
    turns: Sequence[int]
    spans: Sequence[tuple[int, int]]
    num_tokens: int


def merged_columns(
    rows: Sequence[MergedRow], declared: Sequence[DeclaredColumn]
) -> dict[str, ExtraColumn]:
    """Return every declared column of these rows, in order of name; others are ignored.

    Router choices come in the narrowest type that the stored ones have in common.
    """
    columns: dict[str, ExtraColumn] = {}
    for column in declared:
        pieces: list[NDArray[Any]] = [no_values(column)]
        counts: list[int] = []
        for row in rows:
            of_row = _row_pieces(row, column)
            pieces += of_row
            counts.append(sum([len(piece) for piece in of_row]))
        offsets = offsets_of(counts)
        values = Ragged(np.concatenate(pieces), offsets)
        columns[column.name] = ExtraColumn(per=column.per, values=values)
    return columns


def merged_sequence_columns(
    rows: Sequence[MergedRow], declared: Sequence[DeclaredColumn]
) -> list[dict[str, SequenceColumn]]:
    """The same row by row, with what is needed to cut the rows into turns again."""
    columns = merged_columns(rows, declared)
    return [
        {
            column.name: SequenceColumn(
                column.per, columns[column.name].values[number], _ends(row, column)
            )
            for column in declared
        }
        for number, row in enumerate(rows)
    ]


def split_columns(
    columns: Mapping[str, SequenceColumn],
    *,
    place: int,
    prompt_length: int,
    span: tuple[int, int],
) -> dict[str, NDArray[Any]]:
    """Return the values of one turn of a row, as views; columns without a value are left out.

    `place` is the position of the turn in its row, and `span` the begin and end of its response.
    """
    turns: dict[str, NDArray[Any]] = {}
    for name, column in columns.items():
        match column.per:
            case "token":
                values = column.values[: prompt_length + span[1]]
            case "response_token":
                values = column.values[slice(*span)]
            case "row":
                values = column.values
            case "first_tokens" | "items":
                values = column.values[: column.ends[place]]
        if len(values) or column.per == "response_token":
            turns[name] = values
    return turns


def whole_extras(
    stored: Sequence[StoredTurn], declared: Sequence[DeclaredColumn]
) -> list[dict[str, NDArray[Any]]]:
    """Return the extra columns of every turn with the values that it shares.

    A turn that left an optional column out has none of it. Turns that share its tokens have the
    fill there, as a row has.
    """
    return [
        {
            column.name: np.concatenate(turn_pieces(stored, number, column)).astype(column.dtype)
            for column in declared
            if column.name in turn.extras or not column.is_optional
        }
        for number, turn in enumerate(stored)
    ]


def _ends(row: MergedRow, column: DeclaredColumn) -> tuple[int, ...]:
    if column.per not in ("first_tokens", "items"):
        return ()
    pieces = [_own_piece(row.stored[turn], column) for turn in row.turns]
    return tuple([piece.num_shared + len(piece.values) for piece in pieces])


def _row_pieces(row: MergedRow, column: DeclaredColumn) -> list[NDArray[Any]]:
    """Return the values of the row in the column, in order."""
    if column.per == "response_token":
        return _response_pieces(row, column)
    if column.per == "row":
        return [_agreed_value(row, column)]
    pieces = turn_pieces(row.stored, row.turns[-1], column)
    num_values = sum([len(piece) for piece in pieces])
    most = num_values if column.per == "items" else row.num_tokens
    least = row.num_tokens if column.per == "token" else 0
    if not least <= num_values <= most:
        raise InvalidTurnError(
            field_of(column), f"{num_values} values for a row of {row.num_tokens} tokens"
        )
    return pieces


def _response_pieces(row: MergedRow, column: DeclaredColumn) -> list[NDArray[Any]]:
    pieces: list[NDArray[Any]] = []
    last = 0
    for turn, (begin, end) in zip(row.turns, row.spans, strict=True):
        if begin > last:
            pieces.append(filled(column, begin - last))
        pieces.append(_own_piece(row.stored[turn], column).values)
        last = end
    return pieces


def _agreed_value(row: MergedRow, column: DeclaredColumn) -> NDArray[Any]:
    first, *others = row.turns
    (value,) = _one_piece(turn_pieces(row.stored, first, column))
    for other in others:
        (found,) = _one_piece(turn_pieces(row.stored, other, column))
        if found.tobytes() != value.tobytes():
            raise UnmergeableColumnError(column.name, first, other)
    return value


def _one_piece(pieces: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    return [piece for piece in pieces if len(piece)]


def turn_pieces(
    stored: Sequence[StoredTurn], turn: int, column: DeclaredColumn
) -> list[NDArray[Any]]:
    """Return all values of a turn in a column, its parents' part first, as views."""
    missing, values = _own_piece(stored[turn], column)
    pieces = [values]
    while missing:
        turn, child = stored[turn].parent_turn, turn
        if not 0 <= turn < child:
            raise InvalidTurnError("parent_turn", f"turn {child} follows turn {turn}")
        num_shared, values = _own_piece(stored[turn], column)
        if missing > num_shared + len(values):
            raise InvalidTurnError(
                field_of(column),
                f"{missing} values of turn {turn}, which has {num_shared + len(values)}",
            )
        if missing > num_shared:
            pieces.append(values[: missing - num_shared])
        missing = min(missing, num_shared)
    pieces.reverse()
    return pieces


def _own_piece(turn: StoredTurn, column: DeclaredColumn) -> ExtraPiece:
    """Return the values of a column in a stored turn, or the default."""
    piece = turn.extras.get(column.name)
    if piece is None:
        return _stand_in(turn, column)
    num_shared, values = piece
    is_type = values.dtype == column.numpy_dtype or (
        column.per == "first_tokens" and values.dtype.name in ROUTE_DTYPES
    )
    if not is_type or values.shape[1:] != column.shape:
        raise InvalidTurnError(
            field_of(column),
            f"turn {turn.index} has {values.dtype}{list(values.shape)}, declared is "
            f"{column.dtype}[n{shape_of(column)}]",
        )
    expected = {
        "token": (turn.shared_tokens, len(turn.token_ids)),
        "response_token": (0, turn.num_response_tokens),
        "row": (num_shared, 1 - num_shared),
    }.get(column.per, (num_shared, len(values)))
    if (num_shared, len(values)) != expected:
        raise InvalidTurnError(
            field_of(column),
            f"turn {turn.index} has {num_shared} shared and {len(values)} own values, not "
            f"{expected[0]} and {expected[1]}",
        )
    return piece


def _stand_in(turn: StoredTurn, column: DeclaredColumn) -> ExtraPiece:
    counts = {
        "token": turn.shared_tokens + len(turn.token_ids),
        "response_token": turn.num_response_tokens,
    }
    has_values = counts.get(column.per, 1) > 0
    if has_values and column.per != "items" and not column.is_optional:
        raise InvalidTurnError(field_of(column), f"turn {turn.index} has none")
    match column.per:
        case "token":
            return ExtraPiece(turn.shared_tokens, filled(column, len(turn.token_ids)))
        case "response_token":
            return ExtraPiece(0, filled(column, turn.num_response_tokens))
        case "row":
            return ExtraPiece(0, filled(column, 1))
        case "first_tokens" | "items":
            return ExtraPiece(0, no_values(column))


def inert_columns(
    like: Mapping[str, ExtraColumn], lengths_B: Sequence[int], responses_B: Sequence[int]
) -> dict[str, ExtraColumn]:
    """Return zeros for inert rows of these lengths: no item, and no captured token."""
    counts: dict[str, Sequence[int]] = {
        "token": lengths_B,
        "response_token": responses_B,
        "row": [1] * len(lengths_B),
    }
    none = [0] * len(lengths_B)
    return {
        name: replace(column, values=_zeros(column, counts.get(column.per, none)))
        for name, column in like.items()
    }


def _zeros(column: ExtraColumn, counts_B: Sequence[int]) -> Ragged[Any]:
    offsets = offsets_of(counts_B)
    return Ragged(np.zeros((int(offsets[-1]), *column.shape), column.dtype), offsets)


_DTYPES: tuple[tuple[int, type[np.integer]], ...] = (
    (1 << 8, np.uint8),
    (1 << 15, np.int16),
    (1 << 31, np.int32),
)


def narrowed(choices: NDArray[Any], *, field: str = "routes") -> NDArray[Any]:
    """The same choices in the narrowest type that holds them all."""
    smallest = int(choices.min(initial=0))
    if smallest < 0:
        raise InvalidTurnError(field, f"expert {smallest} is below 0")
    largest = int(choices.max(initial=0))
    dtype = next((dtype for limit, dtype in _DTYPES if largest < limit), None)
    if dtype is None:
        raise InvalidTurnError(field, f"expert {largest} is above {_DTYPES[-1][0] - 1}")
    return choices.astype(dtype, copy=False)


def dummy_choice(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the choice of a token without a captured one: 0, 1 .. topk-1 in every layer.

    `shape` is that of one value, (layers, topk); zeros where it is no list of whole numbers.
    """
    if not shape or dtype.kind not in "iu":
        return np.zeros(shape, dtype)
    return np.broadcast_to(np.arange(shape[-1], dtype=dtype), shape)
