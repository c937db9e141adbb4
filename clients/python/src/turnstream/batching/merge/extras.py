"""Extra columns of a turn, cut to the values that no earlier turn of the trajectory holds.

The values of a turn describe its whole prompt + response. In this example, the prompt of turn 2
extends turn 1, and only the rest is stored::

                    turn 1: prompt "ab", response "C"     turn 2: prompt "abcd", response "E"
    token           3 values                              2: of "d" and "e"
    first_tokens    2: the model read "a" and "b"         2: of "c" and "d", not captured before
    items           the 5 patches of one image            those of a second image, if there is one
    response_token  1                                     1
    row             1                                     none: it is the same

**Router choices of a merged row.** A token keeps the choice of the first turn that captured it,
under which its log-probability was taken. The model reads the last sampled token of a turn only
with the next prompt, so its choice is the next turn's.

**Items.** A turn without items keeps those of the tokens it shares. Items that differ from those of
a row's last turn mean another image: such a turn shares nothing with that turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.config.declarations import (
    field_of,
    filled,
    no_values,
    require_declared,
)
from turnstream.batching.merge.merged_extras import narrowed
from turnstream.batching.merge.prefix import PrefixMatch
from turnstream.errors import InvalidTurnError
from turnstream.types import NO_PARENT, DeclaredColumn, ExtraPiece, Turn


class LinkedTurn(NamedTuple):
    """The parent of a turn, and the stored values of its extra columns.

    Attributes:
        match: first of the given matches whose items the turn has too, or no match.
        pieces: name to stored values, sorted.
    """

    match: PrefixMatch
    pieces: dict[str, ExtraPiece]


class _Known(NamedTuple):
    """Counts of a known turn, with digests of its items and the bytes of its row values."""

    match: PrefixMatch
    num_prompt_tokens: int
    num_tokens: int
    num_shared: dict[str, int]
    counts: dict[str, int]
    digests: dict[str, bytes]


class ExtraIndex:
    """Extra columns of the known turns of a trajectory, for cutting the next turn.

    Turns are numbered from 0 in the order of `add`. Items are compared by SHA-256: no image is
    kept.
    """

    def __init__(self, declared: Sequence[DeclaredColumn]) -> None:
        self._declared = declared
        self._turns: list[_Known] = []

    def link(self, turn: Turn, matches: Iterable[PrefixMatch]) -> LinkedTurn:
        """Cut the next turn, with an array per column as declared; nothing is remembered.

        `matches` go by tokens alone, the best first, one at least.
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
        """Return a stored turn whose missing items are none: its stored items are complete."""
        none = {c.name: no_values(c) for c in self._declared if c.per == "items"}
        return replace(turn, extras={**none, **turn.extras}) if none else turn

    def add(self, turn: Turn, linked: LinkedTurn) -> None:
        """Remember the next turn, given the result of `link`."""
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
        """Return the value of the turn; a constant column may take it from turn 0."""
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
        """Return how many leading items a turn up the chain has; without values, all of its own."""
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
        """The turn whose items are exactly those of the shared tokens; None if they have none."""
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
