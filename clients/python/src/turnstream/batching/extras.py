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
dummy choice, and the mask of `turnstream.batching.extra_layouts` says so. A later capture of a
token never replaces an earlier one: its log-probability was taken under the earlier.

**Items.** A turn that gives none keeps those of the tokens it shares. One that gives others than
those of a row's last turn, so that the same placeholder tokens stand for another image, does not go
on in that row, nor share anything with that turn: the row is as another context would be.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.declarations import (
    checked_declarations,
    field_of,
    filled,
    no_values,
    require_declared,
    require_length,
)
from turnstream.batching.merged_extras import (
    MergedRow,
    inert_columns,
    merged_columns,
    merged_sequence_columns,
    split_columns,
)
from turnstream.batching.prefix import PrefixMatch
from turnstream.batching.routes import narrowed
from turnstream.errors import InvalidTurnError
from turnstream.types import NO_PARENT, DeclaredColumn, ExtraPiece, StoredTurn, Turn

__all__ = [
    "ExtraIndex",
    "LinkedTurn",
    "MergedRow",
    "checked_declarations",
    "inert_columns",
    "merged_columns",
    "merged_sequence_columns",
    "require_declared",
    "require_length",
    "split_columns",
    "whole_extras",
]


class LinkedTurn(NamedTuple):
    """Where a turn hangs, and what is stored of its extra columns.

    Attributes:
        match: the first of those given whose items the turn has too; no match where there is none.
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
    """Return the extra columns of every turn, whole: shared values are put back in front.

    A turn that left an optional column out comes back without it. Later turns may share its tokens:
    they get the values that a row has there, which are its parent's and then the fill.

    Args:
        stored: the turns of a trajectory, in order.
        declared: the columns of its run.

    Raises:
        InvalidTurnError: a turn shares more values than its parent holds.
    """
    dtypes = {column.name: column.numpy_dtype for column in declared}
    whole: list[dict[str, NDArray[Any]]] = []
    held: list[dict[str, NDArray[Any]]] = []  # the same, and what rows have of left-out columns
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
            known = held[turn.parent_turn].get(name)
            if known is None or len(known) < num_shared:
                raise InvalidTurnError(
                    f"extras[{name!r}]", f"{num_shared} values shared with turn {turn.parent_turn}"
                )
            values[name] = np.concatenate((known[:num_shared], values[name]))
        whole.append(values)
        held.append(_filled_in(values, turn, held, declared))
    return whole


def _filled_in(
    values: dict[str, NDArray[Any]],
    turn: StoredTurn,
    held: Sequence[dict[str, NDArray[Any]]],
    declared: Sequence[DeclaredColumn],
) -> dict[str, NDArray[Any]]:
    """Return the values of a turn, and of each per-token column that it left out those of its row.

    Args:
        values: of the turn, by name.
        turn: as it is stored.
        held: the same of the turns before it.
        declared: the columns of the run.
    """
    missing = [each for each in declared if each.per == "token" and each.name not in values]
    of_row = dict(values)
    for column in missing:
        own = filled(column, len(turn.token_ids))
        if turn.shared_tokens:
            shared = held[turn.parent_turn][column.name][: turn.shared_tokens]
            own = np.concatenate((shared, own))
        of_row[column.name] = own
    return of_row


class ExtraIndex:
    """What the turns of a trajectory hold of the declared columns, for cutting the next turn.

    Turns are numbered from 0 in the order of `add`. Items are compared by SHA-256, so that no
    image is kept.
    """

    def __init__(self, declared: Sequence[DeclaredColumn]) -> None:
        self._declared = declared
        self._turns: list[_Known] = []

    def link(self, turn: Turn, matches: Iterable[PrefixMatch]) -> LinkedTurn:
        """Cut the next turn; nothing is remembered.

        Args:
            turn: with an array per column, as declared; optional columns and items may be missing.
            matches: by its tokens alone, one at least, the best first.

        Raises:
            InvalidTurnError: a column is not as declared, or needed and missing.
        """
        require_declared(turn, self._declared)
        if not self._declared:
            return LinkedTurn(next(iter(matches)), {})
        extended = (match for match in matches if self._extends(turn, match))
        match = next(extended, PrefixMatch(NO_PARENT, 0))
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
        none = {c.name: no_values(c) for c in self._declared if c.per == "items"}
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
                own = no_values(column) if values is None else values[num_shared:]
                return ExtraPiece(num_shared, narrowed(own, field=field_of(column)))
            case "response_token":
                num_shared = 0
            case "row":
                values = self._row_value(column, values)
                num_shared = self._num_shared_values(column, values, match)
            case "items":
                num_shared = self._num_shared_items(column, values, match)
        return ExtraPiece(num_shared, no_values(column) if values is None else values[num_shared:])

    def _row_value(self, column: DeclaredColumn, values: NDArray[Any] | None) -> NDArray[Any]:
        """What is said of the turn; of a constant column turn 0 may have said it."""
        if values is not None:
            return values
        if column.is_constant and self._turns:
            said = np.frombuffer(self._turns[0].digests[column.name], column.dtype)
            return said.reshape(1, *column.shape)
        return filled(column, 1)

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
                field_of(column),
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
                field_of(column),
                f"is missing: the prompt shares {shared_tokens} tokens with turn {turn}, whose "
                f"prompt of {known.num_prompt_tokens} brought items; say which are here",
            )
        return turn if count else None


def _digest(values: NDArray[Any]) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(values).data).digest()
