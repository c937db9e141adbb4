"""Extra columns through the merge: what a turn brings is cut, stored once, and put together again.

Everything that a turn gives is said of its whole prompt + response, as the prompt is. Of turn 2,
whose prompt extends turn 1, only the rest is stored::

                    turn 1: prompt "ab", response "C"     turn 2: prompt "abcd", response "E"
    token           3 values                              2: of "d" and "e"
    first_tokens    2: "a" and "b" went through the       2: of "c" and "d", the first that nobody
                    model, the sampled "c" did not        captured before
    items           the 5 patches of one image            those of a second image, if there is one
    response_token  1                                     1
    row             1                                     none: it is the same

**Router choices of a merged row.** Every token has the choice of the first turn of its chain that
captured it: for nearly all tokens the turn that sampled or first saw them. The last token that a
turn sampled went through the model only as a part of the next prompt, so that its choice is the
next turn's: this is what the tokens behind it were sampled under. Captures begin at the first token
of a prompt, so what a row has of them is its first tokens without a gap; behind them stands the
dummy choice, and the mask of `turnstream.batching.routes` says so. A later capture of a token never
replaces an earlier one: its log-probability was taken under the earlier.

**Items.** A turn that gives none keeps those of the tokens it shares. One that gives others than
the turn it continues, so that the same placeholder tokens stand for another image, shares nothing
with it and begins a row of its own, as after any edit of the context.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.prefix import PrefixMatch
from turnstream.batching.routes import narrowed
from turnstream.errors import InvalidConfigError, InvalidTurnError, UnmergeableColumnError
from turnstream.types import (
    NO_PARENT,
    DeclaredColumn,
    ExtraColumn,
    ExtraPiece,
    Ragged,
    SequenceColumn,
    StoredTurn,
    Turn,
)
from turnstream.types.extras import ROUTE_DTYPES


def checked_declarations(given: object, *, merge: bool) -> tuple[DeclaredColumn, ...]:
    """The declarations in order of name, also from the objects that JSON makes of them.

    Args:
        given: DeclaredColumn values, or mappings of their fields.
        merge: whether the run merges turns.

    Raises:
        InvalidConfigError: one cannot be, a name comes twice, or merged rows cannot carry one.
    """
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


# --------------------------------------------------------------------------------------
# a turn, cut to what its parent does not hold


class LinkedTurn(NamedTuple):
    """Where a turn hangs, and what is stored of its extra columns.

    Attributes:
        match: as given, or no match where the items are not those of the turn that it continues.
        pieces: by name, in order of name.
    """

    match: PrefixMatch
    pieces: dict[str, ExtraPiece]


class _Known(NamedTuple):
    """What is remembered of a turn: counts, and digests of items; of a row's value the bytes."""

    match: PrefixMatch
    num_prompt_tokens: int
    num_tokens: int
    num_shared: dict[str, int]
    counts: dict[str, int]
    digests: dict[str, bytes]


def whole_extras(
    stored: Sequence[StoredTurn], declared: Sequence[DeclaredColumn]
) -> list[dict[str, NDArray[Any]]]:
    """What every turn says of its extra columns, whole: what the cut took away, put back.

    A column of no values is not stored, so that one that may be left out comes back left out.

    Args:
        stored: the turns of a trajectory, in order.
        declared: the columns of its run.

    Raises:
        InvalidTurnError: a turn claims values that its parent does not hold.
    """
    dtypes = {column.name: column.numpy_dtype for column in declared}
    whole: list[dict[str, NDArray[Any]]] = []
    for turn in stored:
        values = {
            column.name: np.zeros((0, *column.shape), column.dtype)
            for column in declared
            if not column.is_optional
        }
        # Stored in the narrowest type that holds them.
        values |= {
            n: p.values.astype(dtypes.get(n, p.values.dtype)) for n, p in turn.extras.items()
        }
        for name, (num_shared, _) in turn.extras.items():
            if not num_shared:
                continue
            known = whole[turn.parent_turn].get(name)
            if known is None or len(known) < num_shared:
                raise InvalidTurnError(
                    f"extras[{name!r}]", f"{num_shared} values shared with turn {turn.parent_turn}"
                )
            values[name] = np.concatenate((known[:num_shared], values[name]))
        whole.append(values)
    return whole


class ExtraIndex:
    """What the turns of a trajectory hold of the declared columns, for cutting the next turn.

    Turns are numbered from 0 in the order of `add`. Items are compared by SHA-256, so that no
    image is kept.
    """

    def __init__(self, declared: Sequence[DeclaredColumn]) -> None:
        self._declared = declared
        self._turns: list[_Known] = []

    def link(self, turn: Turn, match: PrefixMatch) -> LinkedTurn:
        """Cut the next turn; nothing is remembered.

        Args:
            turn: with an array per column, as declared; optional columns and items may be missing.
            match: by its tokens alone.

        Raises:
            InvalidTurnError: a column is not as declared, or needed and missing.
        """
        require_declared(turn, self._declared)
        if not self._declared:
            return LinkedTurn(match, {})
        if not self._extends(turn, match):
            match = PrefixMatch(NO_PARENT, 0)
        pieces: dict[str, ExtraPiece] = {}
        for column in self._declared:
            piece = self._cut(column, turn, match)
            if piece.num_shared or len(piece.values):
                pieces[column.name] = piece
        return LinkedTurn(match, pieces)

    def as_stored(self, turn: Turn) -> Turn:
        """A turn that is stored already: of items that it does not have, it has none.

        One that left them out, and took over those of the shared tokens, has them stored.
        """
        none = {c.name: _no_values(c) for c in self._declared if c.per == "items"}
        return replace(turn, extras={**none, **turn.extras}) if none else turn

    def add(self, turn: Turn, linked: LinkedTurn) -> None:
        """Remember the next turn, given what `link` said of it."""
        if not self._declared:
            return
        pieces = linked.pieces
        self._turns.append(
            _Known(
                match=linked.match,
                num_prompt_tokens=len(turn.prompt_ids),
                num_tokens=len(turn.prompt_ids) + len(turn.response_ids),
                num_shared={name: piece.num_shared for name, piece in pieces.items()},
                counts={n: piece.num_shared + len(piece.values) for n, piece in pieces.items()},
                digests=dict(self._digests(turn, linked.match)),
            )
        )

    def _digests(self, turn: Turn, match: PrefixMatch) -> Iterator[tuple[str, bytes]]:
        for column in self._declared:
            values = turn.extras.get(column.name)
            if column.per == "row":
                yield column.name, self._row_value(column, values).tobytes()
            elif column.per == "items" and values is not None:
                yield column.name, _digest(values)
            elif column.per == "items":
                keeper = self._keeper(column, match)
                if keeper is not None:
                    yield column.name, self._turns[keeper].digests[column.name]

    def _extends(self, turn: Turn, match: PrefixMatch) -> bool:
        """Whether the turn's items begin with all of the turn that it continues, if it does."""
        if match.parent_turn == NO_PARENT:
            return True
        parent = self._turns[match.parent_turn]
        if match.shared_tokens < parent.num_tokens:
            return True
        for column in self._declared:
            values = turn.extras.get(column.name) if column.per == "items" else None
            count = parent.counts.get(column.name, 0)
            if values is None or count == 0:
                continue
            if _digest(values[:count]) != parent.digests[column.name]:
                return False
        return True

    def _cut(self, column: DeclaredColumn, turn: Turn, match: PrefixMatch) -> ExtraPiece:
        values = turn.extras.get(column.name)
        match column.per:
            case "token":
                num_shared = 0 if values is None else match.shared_tokens
            case "first_tokens":
                num_shared = self._num_captured(column, match)
                own = _no_values(column) if values is None else values[num_shared:]
                return ExtraPiece(num_shared, narrowed(own))
            case "response_token":
                num_shared = 0
            case "row":
                values = self._row_value(column, values)
                num_shared = self._num_shared_values(column, values, match)
            case "items":
                num_shared = self._num_shared_items(column, values, match)
        return ExtraPiece(num_shared, _no_values(column) if values is None else values[num_shared:])

    def _row_value(self, column: DeclaredColumn, values: NDArray[Any] | None) -> NDArray[Any]:
        """What is said of the turn; of a constant column turn 0 may have said it."""
        if values is not None:
            return values
        if column.is_constant and self._turns:
            said = np.frombuffer(self._turns[0].digests[column.name], column.dtype)
            return said.reshape(1, *column.shape)
        return _filled(column, 1)

    def _num_captured(self, column: DeclaredColumn, match: PrefixMatch) -> int:
        """The shared tokens of which the parent has the choice."""
        if match.parent_turn == NO_PARENT:
            return 0
        known = self._turns[match.parent_turn].counts.get(column.name, 0)
        return min(known, match.shared_tokens)

    def _num_shared_values(
        self, column: DeclaredColumn, value: NDArray[Any], match: PrefixMatch
    ) -> int:
        """1 where the parent has the same value, 0 elsewhere."""
        digest = value.tobytes()
        if column.is_constant and self._turns and self._turns[0].digests[column.name] != digest:
            raise InvalidTurnError(
                _field(column),
                f"{value[0].tolist()!r} is not that of turn 0, and the column is declared constant",
            )
        parent = match.parent_turn
        return int(parent != NO_PARENT and self._turns[parent].digests[column.name] == digest)

    def _num_shared_items(
        self, column: DeclaredColumn, values: NDArray[Any] | None, match: PrefixMatch
    ) -> int:
        """The items that these begin with and a turn up the chain has; all of them if not given."""
        if values is None:
            keeper = self._keeper(column, match)
            return 0 if keeper is None else self._turns[keeper].counts[column.name]
        limit, turn = len(values), match.parent_turn
        while turn != NO_PARENT:
            known = self._turns[turn]
            count = known.counts.get(column.name, 0)
            if 0 < count <= limit and _digest(values[:count]) == known.digests[column.name]:
                return count
            limit = min(limit, known.num_shared.get(column.name, 0))
            turn = known.match.parent_turn
        return 0

    def _keeper(self, column: DeclaredColumn, match: PrefixMatch) -> int | None:
        """The turn whose items are exactly those of the shared tokens; None if they have none.

        Raises:
            InvalidTurnError: the shared tokens end inside a prompt that brought items.
        """
        turn, shared_tokens = match
        if turn == NO_PARENT:
            return None
        known = self._turns[turn]
        count = known.counts.get(column.name, 0)
        if shared_tokens < known.num_prompt_tokens and count > known.num_shared.get(column.name, 0):
            raise InvalidTurnError(
                _field(column),
                f"is missing: the prompt shares {shared_tokens} tokens with turn {turn}, whose "
                f"prompt of {known.num_prompt_tokens} brought items; say which are here",
            )
        return turn if count else None


def require_declared(turn: Turn, declared: Sequence[DeclaredColumn]) -> None:
    """Refuse a turn whose extra columns are not exactly as declared; values are not looked at.

    Raises:
        InvalidTurnError: names the column and what is wrong with it.
    """
    names = [column.name for column in declared]
    for name in turn.extras:
        if name not in names:
            raise InvalidTurnError(f"extras[{name!r}]", f"the run declares {_list_of(names)}")
    num_prompt, num_response = len(turn.prompt_ids), len(turn.response_ids)
    for column in declared:
        values = turn.extras.get(column.name)
        if values is None:
            if not column.is_optional and column.per != "items":
                raise InvalidTurnError(_field(column), "is missing, and not declared optional")
            continue
        if values.dtype != column.numpy_dtype or values.shape[1:] != column.shape:
            raise InvalidTurnError(
                _field(column),
                f"{values.dtype}{list(values.shape)} is not {column.dtype}[n{_shape_of(column)}]",
            )
        require_length(column, len(values), num_prompt=num_prompt, num_response=num_response)


def require_length(
    column: DeclaredColumn, num_values: int, *, num_prompt: int, num_response: int
) -> None:
    """Refuse another number of values than a turn of these lengths has of the column.

    Raises:
        InvalidTurnError: names the column and both numbers.
    """
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
        raise InvalidTurnError(_field(column), f"has {num_values} values for {what}")


# --------------------------------------------------------------------------------------
# rows, put together of what is stored


class MergedRow(NamedTuple):
    """One row, by what is stored of it.

    Attributes:
        stored: all turns of its trajectory.
        turns: indices of those that it merges, each the parent of the next.
        spans: begin and end of every turn's own response, counted in response tokens.
        num_tokens: of prompt + response.
    """

    stored: Sequence[StoredTurn]
    turns: Sequence[int]
    spans: Sequence[tuple[int, int]]
    num_tokens: int


def merged_columns(
    rows: Sequence[MergedRow], declared: Sequence[DeclaredColumn]
) -> dict[str, ExtraColumn]:
    """Every declared column of these rows, in order of name; what is not declared is passed over.

    Router choices come in the narrowest type that the stored ones have in common.

    Raises:
        InvalidTurnError: a stored column is not as declared, or its parents do not hold what it
            shares with them.
        UnmergeableColumnError: turns of a row differ in a column that has one value per row.
    """
    columns: dict[str, ExtraColumn] = {}
    for column in declared:
        pieces: list[NDArray[Any]] = [_no_values(column)]
        offsets = np.zeros(len(rows) + 1, np.int64)
        for number, row in enumerate(rows):
            of_row = _row_pieces(row, column)
            pieces += of_row
            offsets[number + 1] = offsets[number] + sum([len(piece) for piece in of_row])
        if offsets[-1] > np.iinfo(np.int32).max:
            raise InvalidTurnError(
                _field(column), f"{offsets[-1]} values in one mini-batch: offsets are int32"
            )
        values = Ragged(np.concatenate(pieces), offsets.astype(np.int32))
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
    """What one turn of a row gave, as views; columns of which it has no value are left out.

    Args:
        columns: of the row.
        place: of the turn in its row.
        prompt_length: of the row, in tokens.
        span: begin and end of the turn's response, counted in response tokens.
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


def _ends(row: MergedRow, column: DeclaredColumn) -> tuple[int, ...]:
    if column.per not in ("first_tokens", "items"):
        return ()
    pieces = [_own_piece(row.stored[turn], column) for turn in row.turns]
    return tuple([piece.num_shared + len(piece.values) for piece in pieces])


def _row_pieces(row: MergedRow, column: DeclaredColumn) -> list[NDArray[Any]]:
    """What the row has of the column, in order."""
    if column.per == "response_token":
        return _response_pieces(row, column)
    if column.per == "row":
        return [_agreed_value(row, column)]
    pieces = _turn_pieces(row.stored, row.turns[-1], column)
    num_values = sum([len(piece) for piece in pieces])
    most = num_values if column.per == "items" else row.num_tokens
    least = row.num_tokens if column.per == "token" else 0
    if not least <= num_values <= most:
        raise InvalidTurnError(
            _field(column), f"{num_values} values for a row of {row.num_tokens} tokens"
        )
    return pieces


def _response_pieces(row: MergedRow, column: DeclaredColumn) -> list[NDArray[Any]]:
    pieces: list[NDArray[Any]] = []
    last = 0
    for turn, (begin, end) in zip(row.turns, row.spans, strict=True):
        if begin > last:
            pieces.append(_filled(column, begin - last))
        pieces.append(_own_piece(row.stored[turn], column).values)
        last = end
    return pieces


def _agreed_value(row: MergedRow, column: DeclaredColumn) -> NDArray[Any]:
    first, *others = row.turns
    (value,) = _one_piece(_turn_pieces(row.stored, first, column))
    for other in others:
        (found,) = _one_piece(_turn_pieces(row.stored, other, column))
        if found.tobytes() != value.tobytes():
            raise UnmergeableColumnError(column.name, first, other)
    return value


def _one_piece(pieces: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    return [piece for piece in pieces if len(piece)]


def _turn_pieces(
    stored: Sequence[StoredTurn], turn: int, column: DeclaredColumn
) -> list[NDArray[Any]]:
    """Everything that a turn has of a column, its parents' part first, as views.

    Raises:
        InvalidTurnError: the chain of parents does not hold that many values.
    """
    missing, values = _own_piece(stored[turn], column)
    pieces = [values]
    while missing:
        turn, child = stored[turn].parent_turn, turn
        if not 0 <= turn < child:
            raise InvalidTurnError("parent_turn", f"turn {child} follows turn {turn}")
        num_shared, values = _own_piece(stored[turn], column)
        if missing > num_shared + len(values):
            raise InvalidTurnError(
                _field(column),
                f"{missing} values of turn {turn}, which has {num_shared + len(values)}",
            )
        if missing > num_shared:
            pieces.append(values[: missing - num_shared])
        missing = min(missing, num_shared)
    pieces.reverse()
    return pieces


def _own_piece(turn: StoredTurn, column: DeclaredColumn) -> ExtraPiece:
    """What a stored turn holds of a column, or what stands for it where it holds nothing."""
    piece = turn.extras.get(column.name)
    if piece is None:
        return _stand_in(turn, column)
    num_shared, values = piece
    is_type = values.dtype == column.numpy_dtype or (
        column.per == "first_tokens" and values.dtype.name in ROUTE_DTYPES
    )
    if not is_type or values.shape[1:] != column.shape:
        raise InvalidTurnError(
            _field(column),
            f"turn {turn.index} has {values.dtype}{list(values.shape)}, declared is "
            f"{column.dtype}[n{_shape_of(column)}]",
        )
    expected = {
        "token": (turn.shared_tokens, len(turn.token_ids)),
        "response_token": (0, turn.num_response_tokens),
        "row": (num_shared, 1 - num_shared),
    }.get(column.per, (num_shared, len(values)))
    if (num_shared, len(values)) != expected:
        raise InvalidTurnError(
            _field(column),
            f"turn {turn.index} has {num_shared} shared and {len(values)} own values, not "
            f"{expected[0]} and {expected[1]}",
        )
    return piece


def _stand_in(turn: StoredTurn, column: DeclaredColumn) -> ExtraPiece:
    has_values = column.per != "response_token" or turn.num_response_tokens > 0
    if has_values and column.per != "items" and not column.is_optional:
        raise InvalidTurnError(_field(column), f"turn {turn.index} has none")
    match column.per:
        case "token":
            return ExtraPiece(turn.shared_tokens, _filled(column, len(turn.token_ids)))
        case "response_token":
            return ExtraPiece(0, _filled(column, turn.num_response_tokens))
        case "row":
            return ExtraPiece(0, _filled(column, 1))
        case "first_tokens" | "items":
            return ExtraPiece(0, _no_values(column))


# --------------------------------------------------------------------------------------
# rows that count nowhere


def inert_columns(
    like: Mapping[str, ExtraColumn], lengths_B: Sequence[int], responses_B: Sequence[int]
) -> dict[str, ExtraColumn]:
    """Legal values for inert rows: zeros, no item, and no captured token.

    Every layout writes the dummy choice 0, 1 .. topk-1 where nothing was captured, and says so.

    Args:
        like: the columns of real rows.
        lengths_B: tokens of every inert row.
        responses_B: response tokens of every inert row.
    """
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
    offsets = np.cumsum([0, *counts_B]).astype(np.int32)
    return Ragged(np.zeros((int(offsets[-1]), *column.shape), column.dtype), offsets)


def _filled(column: DeclaredColumn, count: int) -> NDArray[Any]:
    return np.full((count, *column.shape), column.fill, column.dtype)


def _no_values(column: DeclaredColumn) -> NDArray[Any]:
    """None in the type of the column, of router choices in the narrowest."""
    dtype = ROUTE_DTYPES[0] if column.per == "first_tokens" else column.dtype
    return np.empty((0, *column.shape), dtype)


def _digest(values: NDArray[Any]) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(values).data).digest()


def _field(column: DeclaredColumn) -> str:
    return f"extras[{column.name!r}]"


def _shape_of(column: DeclaredColumn) -> str:
    return "".join(f", {size}" for size in column.shape)


def _list_of(names: Sequence[str]) -> str:
    return f"only {', '.join(names)}" if names else "no extra column"
