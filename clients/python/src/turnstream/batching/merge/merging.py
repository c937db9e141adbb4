"""The turns of a trajectory: cut to what no earlier turn holds, and merged into rows.

With O for observed and A for sampled tokens, and one turn in each pair of brackets::

    (O1, A1) (O1 A1 O2, A2)                  ->  O1 A1 O2 A2       one row
    (O1, A1) (O3, A3)                        ->  O1 A1 | O3 A3     the context was edited: two
    (O1, A1) (O1 A1 O2, A2) (O1 A1 O3, A3)   ->  O1 A1 O2 A2 | O1 A1 O3 A3
                                                 a branch: A1 is trained in the first row alone,
                                                 and is prompt in the second

Turns form a tree: each names an earlier turn that holds a beginning of its prompt, found by
comparing token ids. A turn joins the row that ends with that turn if its prompt holds all of the
row. The longest such row is taken, and of equal ones the newest. Sampled tokens are trained exactly
once, whatever the split.
"""

from __future__ import annotations

import collections.abc as abc
import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.config.declarations import (
    field_of,
    filled,
    no_values,
    require_declared,
)
from turnstream.batching.merge.columns import OBSERVED, merged_turns, token_columns
from turnstream.batching.merge.left_out import kept_shapes
from turnstream.batching.merge.merged_extras import merged_columns
from turnstream.batching.merge.plan import SequenceShape
from turnstream.batching.merge.prefix import PrefixIndex, PrefixMatch
from turnstream.errors import InvalidTurnError
from turnstream.types import (
    NO_PARENT,
    DeclaredColumn,
    ExtraPiece,
    Sequence,
    StoredTurn,
    StoredTurns,
    Turn,
    TurnShape,
    VersionRun,
)
from turnstream.types.extras import ROUTE_DTYPES
from turnstream.types.names import checked_text, quoted, whole_number


def plan_sequences(shapes: abc.Sequence[TurnShape], *, merge: bool) -> tuple[SequenceShape, ...]:
    """Return the rows of these turns by their lengths alone, or without `merge` one per turn.

    They are those of a trajectory without the turns that are left out.
    """
    num_tokens = [shape.num_tokens for shape in shapes]
    rows: list[list[int]] = []
    row_ending_in: dict[int, list[int]] = {}
    for index, shape in kept_shapes(shapes):
        parent = shape.parent_turn
        row = row_ending_in.get(parent) if merge else None
        if row is not None and shape.shared_tokens == num_tokens[parent]:
            del row_ending_in[parent]
        else:
            row = list[int]()
            rows.append(row)
        row.append(index)
        row_ending_in[index] = row
    return tuple([_sequence_shape(row, shapes) for row in rows])


def _sequence_shape(turns: list[int], shapes: abc.Sequence[TurnShape]) -> SequenceShape:
    first, last = shapes[turns[0]], shapes[turns[-1]]
    return SequenceShape(
        turns=tuple(turns),
        prompt_length=first.num_tokens - first.num_response_tokens,
        num_tokens=last.num_tokens,
        num_trained_tokens=sum([shapes[index].num_trained_tokens for index in turns]),
    )


def turn_prompts(stored: abc.Sequence[StoredTurn]) -> list[NDArray[np.int32]]:
    """Return int32 (P,) per turn: the full prompts of stored turns."""
    contexts: list[NDArray[np.int32]] = []
    prompts: list[NDArray[np.int32]] = []
    for turn in stored:
        context = turn.token_ids
        if turn.shared_tokens:
            shared_ids = contexts[turn.parent_turn][: turn.shared_tokens]
            context = np.concatenate((shared_ids, context))
        contexts.append(context)
        prompts.append(context[: len(context) - turn.num_response_tokens])
    return prompts


def merge_turns(
    turns: abc.Sequence[Turn], *, extra_columns: abc.Sequence[DeclaredColumn] = ()
) -> list[Sequence]:
    """Return the rows of one trajectory, given the full prompt of every turn, by first turn.

    Arrays of the rows are views of shared buffers.
    """
    stored = store_turns(turns, extra_columns=extra_columns)
    planned = plan_sequences([turn.shape for turn in stored], merge=True)
    merged = merged_turns(StoredTurns.of(stored), [row.turns for row in planned])
    columns, extras = token_columns(merged), merged_columns(merged, extra_columns)
    weights = columns.token_weights
    return [
        Sequence(
            turns=row.turns,
            input_ids=columns.input_ids[number],
            prompt_length=row.prompt_length,
            loss_mask=columns.loss_mask[number],
            logprobs=None if columns.logprobs is None else columns.logprobs[number],
            rewards=columns.rewards[number],
            token_weights=None if weights is None else weights[number],
            version_runs=_version_runs(columns.run_versions[number], columns.run_counts[number]),
            turn_spans=tuple(merged.spans_of(number)),
            extras={name: column.values[number] for name, column in extras.items()},
        )
        for number, row in enumerate(planned)
    ]


def _version_runs(versions: NDArray[np.int64], counts: NDArray[np.int32]) -> tuple[VersionRun, ...]:
    return tuple(
        VersionRun(None if version == OBSERVED else version, count)
        for version, count in zip(versions.tolist(), counts.tolist(), strict=True)
    )


_NUM_ANCHOR_BYTES = 8


class LinkedTurn(NamedTuple):
    """The parent of a turn, or no match, and the stored values of its extra columns by name."""

    match: PrefixMatch
    pieces: dict[str, ExtraPiece]


class _Known(NamedTuple):
    """A known turn: its lengths, and number and digest of its values by column."""

    match: PrefixMatch
    num_prompt_tokens: int
    num_tokens: int
    num_shared: dict[str, int]
    counts: dict[str, int]
    digests: dict[str, bytes]


class ExtraIndex:
    """Extra columns of the known turns of a trajectory, for cutting the next turn.

    Their values describe a turn's whole prompt + response. In this example, the prompt of turn 2
    extends turn 1, and only the rest is stored::

                        turn 1: prompt "ab", response "C"   turn 2: prompt "abcd", response "E"
        token           3 values                            2: of "d" and "e"
        first_tokens    2: the model read "a" and "b"       2: of "c" and "d", not captured before
        items           the 5 patches of one image          those of a second image, if there is one
        response_token  1                                   1
        row             1                                   none: it is the same

    A token keeps the router choice of the first turn that captured it, under which its
    log-probability was taken. A turn without items keeps those of the tokens it shares. Items that
    differ from those of a row's last turn mean another image. Then the turn shares nothing with
    that turn.

    Turns are numbered from 0 in the order of `add`. Items are compared by SHA-256: no image is
    kept.
    """

    def __init__(self, declared: abc.Sequence[DeclaredColumn]) -> None:
        self._declared = declared
        self._turns: list[_Known] = []
        self._constants: dict[str, NDArray[Any]] = {}

    def link(self, turn: Turn, matches: Iterable[PrefixMatch]) -> LinkedTurn:
        """Cut the next turn, with an array per column as declared; nothing is remembered.

        `matches` go by tokens alone, the best first, one at least.
        """
        if not (self._declared or turn.extras):
            return LinkedTurn(next(iter(matches)), {})
        require_declared(
            turn.extras,
            self._declared,
            num_prompt=len(turn.prompt_ids),
            num_response=len(turn.response_ids),
        )
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
        match, pieces = linked
        digests: dict[str, bytes] = {}
        for column in self._declared:
            values = self._own_values(column, turn)
            if column.is_constant and values is not None:
                self._constants.setdefault(column.name, values)
            if column.per not in ("row", "items"):
                continue
            source = self._item_source(column, match) if values is None else None
            if values is not None:
                digests[column.name] = _digest(values)
            elif source is not None:
                digests[column.name] = self._turns[source].digests[column.name]
        num_prompt, num_response = len(turn.prompt_ids), len(turn.response_ids)
        self._turns.append(
            _Known(
                match=match,
                num_prompt_tokens=num_prompt,
                num_tokens=num_prompt + num_response,
                num_shared={name: piece.num_shared for name, piece in pieces.items()},
                counts={n: piece.num_shared + len(piece.values) for n, piece in pieces.items()},
                digests=digests,
            )
        )

    @property
    def items(self) -> list[abc.Hashable]:
        """Return digests of the items of each turn; empty if no column has items."""
        names = [column.name for column in self._declared if column.per == "items"]
        return [tuple(map(turn.digests.get, names)) for turn in self._turns] if names else []

    def _extends(self, turn: Turn, match: PrefixMatch) -> bool:
        """Return whether the items begin with all of the turn that it continues, if it does."""
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
        values, num_shared = self._own_values(column, turn), 0
        match column.per:
            case "token" if values is not None:
                num_shared = match.shared_tokens
            case "first_tokens" if match.parent_turn != NO_PARENT:
                known = self._turns[match.parent_turn].counts.get(column.name, 0)
                num_shared = min(known, match.shared_tokens)
            case "items" if values is None:
                source = self._item_source(column, match)
                num_shared = 0 if source is None else self._turns[source].counts[column.name]
            case "row" | "items" if values is not None:
                if column.is_constant:
                    self._check_constant(column, values)
                num_shared = self._num_known(column, values, match.parent_turn)
            case _:
                pass
        own = no_values(column) if values is None else values[num_shared:]
        if column.per == "first_tokens":
            own = narrowed(own, field=field_of(column))
        return ExtraPiece(num_shared, own)

    def _own_values(self, column: DeclaredColumn, turn: Turn) -> NDArray[Any] | None:
        """Return the given values; a row has the constant of the trajectory, or the fill."""
        values = turn.extras.get(column.name)
        if values is None and column.per == "row":
            return self._constants.get(column.name, filled(column, 1))
        return values

    def _check_constant(self, column: DeclaredColumn, value: NDArray[Any]) -> None:
        constant = self._constants.get(column.name, value)
        if constant.tobytes() != value.tobytes():
            raise InvalidTurnError(
                field_of(column),
                f"{value[0].tolist()!r} is not that of turn 0, and the column is declared constant",
            )

    def _num_known(self, column: DeclaredColumn, values: NDArray[Any], turn: int) -> int:
        """Return how many leading values this turn, or one that it continues, has in all."""
        limit = len(values)
        while limit and turn != NO_PARENT:
            known = self._turns[turn]
            count = known.counts.get(column.name, 0)
            if 0 < count <= limit and _digest(values[:count]) == known.digests[column.name]:
                return count
            limit = min(limit, known.num_shared.get(column.name, 0))
            turn = known.match.parent_turn
        return 0

    def _item_source(self, column: DeclaredColumn, match: PrefixMatch) -> int | None:
        """Return the turn whose items are those of the shared tokens; None if they have none."""
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


def store_turns(
    turns: abc.Sequence[Turn], *, extra_columns: abc.Sequence[DeclaredColumn] = ()
) -> list[StoredTurn]:
    """Return the stored form of every turn: the tokens that no earlier turn of it holds."""
    known, extras = PrefixIndex(), ExtraIndex(extra_columns)
    stored: list[StoredTurn] = []
    for index, turn in enumerate(turns):
        linked = extras.link(turn, known.matches(turn.prompt_ids))
        known.add(linked.match, turn.prompt_ids, turn.response_ids)
        extras.add(turn, linked)
        stored.append(stored_turn(turn, linked, index=index))
    return stored


def stored_turn(turn: Turn, linked: LinkedTurn, *, index: int) -> StoredTurn:
    """Return the stored form of a turn: the tokens and values that no earlier turn holds."""
    parent_turn, shared_tokens = linked.match
    return StoredTurn(
        index=index,
        parent_turn=parent_turn,
        shared_tokens=shared_tokens,
        token_ids=np.concatenate((turn.prompt_ids[shared_tokens:], turn.response_ids)),
        num_response_tokens=len(turn.response_ids),
        logprobs=turn.logprobs,
        loss_mask=turn.loss_mask,
        rewards=turn.rewards,
        token_weights=turn.token_weights,
        version_runs=turn.version_runs,
        extras=linked.pieces,
        anchor=anchor_hash(turn.anchor),
        call_id=turn.call_id,
    )


def anchor_hash(anchor: Any) -> int | None:
    """Return the 64 bits that stand for the state in which a turn began; None for None.

    A text or bytes become the first 8 bytes of their SHA-256, read big-endian; a text is the bytes
    of its UTF-8 form. Any language and any process gives the same number, and a generator may send
    such a number itself.

    >>> anchor_hash("room 3") == anchor_hash(b"room 3") == 0xCE7E7C3D821BD771
    True
    >>> anchor_hash(7), anchor_hash(None)
    (7, None)
    """
    if anchor is None:
        return None
    if isinstance(anchor, str):
        anchor = checked_text(anchor, field="anchor").encode()
    if isinstance(anchor, bytes):
        return int.from_bytes(hashlib.sha256(anchor).digest()[:_NUM_ANCHOR_BYTES], "big")
    if not isinstance(anchor, SupportsIndex):
        raise InvalidTurnError("anchor", f"{quoted(anchor)} is not a text, bytes or a whole number")
    return whole_number(anchor, field="anchor", limit=2 ** (8 * _NUM_ANCHOR_BYTES))


def narrowed(choices: NDArray[Any], *, field: str = "routes") -> NDArray[Any]:
    """Return the same router choices in the narrowest type that holds them all."""
    smallest, largest = int(choices.min(initial=0)), int(choices.max(initial=0))
    if smallest < 0:
        raise InvalidTurnError(field, f"expert {smallest} is below 0")
    for dtype in ROUTE_DTYPES:
        if largest <= np.iinfo(dtype).max:
            return choices.astype(dtype, copy=False)
    raise InvalidTurnError(field, f"expert {largest} is above {np.iinfo(ROUTE_DTYPES[-1]).max}")


def _digest(values: NDArray[Any]) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(values).data).digest()
