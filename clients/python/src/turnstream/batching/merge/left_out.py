"""Turns that are left out of the rows: answers that the generator did not use.

With O for observed and A for sampled tokens, and one turn in each pair of brackets::

    (O1, A1) (O1, A2) (O1 A2 O3, A3)  ->  O1 A2 O3 A3    turn 0 is left out

A turn is *continued* if a later turn has it as parent and shares more than its prompt. *Siblings*
are turns with the same whole prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Final

import numpy as np

from turnstream.batching.merge.merged_extras import own_piece
from turnstream.errors import InvalidTurnError
from turnstream.types import (
    NO_PARENT,
    DeclaredColumn,
    ExtraPiece,
    Siblings,
    StoredTurns,
    TurnShape,
)


def left_out(
    shapes: Sequence[TurnShape],
    *,
    siblings: Siblings,
    superseded: Collection[int] = (),
    others: Sequence[Hashable] = (),
) -> frozenset[int]:
    """Return the turns that the seal leaves out of the rows; all but the last at most.

    Args:
        shapes: the lengths of all turns.
        siblings: "mask" leaves out the turns without continuation that have a continued sibling,
            "train" keeps them, and "refuse" raises an InvalidTurnError that names one of them.
        superseded: turns whose call was repeated, and whose answer the agent never had. They are
            left out if no turn continues them, whatever `siblings` says.
        others: for each turn the content of its prompt in addition to tokens, as of images; empty
            where there is none. Siblings have the same.

    Equal prompts are found by the links of the turns. They are missed after two equal answers to
    one prompt, because these are two turns.

    >>> first, second = TurnShape(NO_PARENT, 0, 5, 3, 3), TurnShape(0, 5, 0, 2, 2)
    >>> after_second = TurnShape(1, 7, 4, 1, 1)
    >>> sorted(left_out([first, second, after_second], siblings="mask"))
    [0]
    >>> sorted(left_out([first, second, after_second], siblings="train"))
    []
    >>> left_out([first, second, after_second], siblings="refuse")
    Traceback (most recent call last):
    turnstream.errors.InvalidTurnError: siblings: turns 0 and 1 have the same prompt, and only \
turn 1 is continued
    >>> sorted(left_out([first, second], siblings="mask"))  # no later turn has chosen
    []
    >>> sorted(left_out([first, second], siblings="train", superseded=[0]))
    [0]
    >>> sorted(left_out([first, second], siblings="train", superseded=[0, 1]))
    [0]
    """
    if unknown := [turn for turn in superseded if not 0 <= turn < len(shapes)]:
        message = f"names turn {unknown[0]} of a trajectory of {len(shapes)} turns"
        raise InvalidTurnError("superseded", message)
    if siblings == "train" and not superseded:
        return frozenset()
    continued = continued_turns(shapes).keys()
    unused = set(superseded) - continued
    if siblings != "train":
        prompts = _prompts(shapes, others)
        answered = {prompts[turn]: turn for turn in sorted(continued, reverse=True)}
        for turn in sorted({*range(len(shapes))} - continued - unused):
            chosen = answered.get(prompts[turn])
            if chosen is None:
                continue
            if siblings == "refuse":
                first, second = sorted((turn, chosen))
                raise InvalidTurnError(
                    "siblings",
                    f"turns {first} and {second} have the same prompt, and only turn {chosen} is "
                    "continued",
                )
            unused.add(turn)
    if len(unused) == len(shapes):
        unused.discard(len(shapes) - 1)
    return frozenset(unused)


def continued_turns(shapes: Sequence[TurnShape]) -> dict[int, int]:
    """Return the turns that are continued, each with the last turn that continues it."""
    return {
        shape.parent_turn: turn
        for turn, shape in enumerate(shapes)
        if shape.parent_turn != NO_PARENT
        and shape.shared_tokens > _num_prompt_tokens(shapes[shape.parent_turn])
    }


def _num_prompt_tokens(shape: TurnShape) -> int:
    return shape.num_tokens - shape.num_response_tokens


def _prompts(shapes: Sequence[TurnShape], others: Sequence[Hashable]) -> list[Hashable]:
    """Return a value for the prompt of each turn; equal prompts have equal values.

    It is the turn that added the last token of the prompt, and the number of tokens.
    """
    before: list[int] = []  # the turn that added the last of the shared tokens
    prompts: list[Hashable] = []

    def added_by(turn: int, num_tokens: int) -> int:
        while turn != NO_PARENT and num_tokens <= shapes[turn].shared_tokens:
            turn = before[turn]
        return turn

    for turn, shape in enumerate(shapes):
        before.append(added_by(shape.parent_turn, shape.shared_tokens))
        num_tokens = _num_prompt_tokens(shape)
        other = others[turn] if others else None
        prompts.append((added_by(turn, num_tokens), num_tokens, other))
    return prompts


def kept_shapes(shapes: Sequence[TurnShape]) -> Iterable[tuple[int, TurnShape]]:
    """Yield the number and shape of each kept turn; no parent of these is left out.

    Turn 2 shares the prompt of turn 1, which is left out and shares 4 tokens with turn 0:

    >>> dict(kept_shapes([
    ...     TurnShape(NO_PARENT, 0, 2, 2, 2),
    ...     TurnShape(0, 4, 1, 1, 0, is_left_out=True),
    ...     TurnShape(1, 5, 0, 1, 1),
    ... ]))[2][:3]
    (0, 4, 1)
    """
    if True not in [shape.is_left_out for shape in shapes]:
        return enumerate(shapes)
    moved: list[TurnShape] = []
    for shape in shapes:
        if shape.parent_turn != NO_PARENT and shapes[shape.parent_turn].is_left_out:
            parent = moved[shape.parent_turn]
            num_shared = min(shape.shared_tokens, parent.shared_tokens)
            num_new = shape.num_new_prompt_tokens + shape.shared_tokens - num_shared
            shape = TurnShape(parent.parent_turn, num_shared, num_new, *shape[3:])
        moved.append(shape)
    return [(number, shape) for number, shape in enumerate(moved) if not shape.is_left_out]


def without_left_out(
    stored: StoredTurns, unused: Collection[int], declared: Sequence[DeclaredColumn]
) -> StoredTurns:
    """Return the turns with parents that are not left out, and with the tokens of these.

    Values of extra columns move in the same way. Turns keep their positions. `unused` are the
    positions of the turns that are left out.
    """
    parents, shared, ids = [*stored.parent_turn], [*stored.shared_tokens], [*stored.token_ids]
    extras = [*stored.extras]
    for turn, parent in enumerate(stored.parent_turn):
        if turn in unused or parent not in unused:
            continue
        pieces = _pieces(stored, turn, declared)
        child = turn
        while parent in unused:
            if not 0 <= parent < child:
                raise InvalidTurnError("parent_turn", f"turn {child} follows turn {parent}")
            above = _pieces(stored, parent, declared)
            pieces = {name: _moved(piece, above[name]) for name, piece in pieces.items()}
            parent, child = stored.parent_turn[parent], parent
        parents[turn], (shared[turn], ids[turn]) = parent, pieces.pop(_TOKENS)
        extras[turn] = pieces
    return stored._replace(parent_turn=parents, shared_tokens=shared, token_ids=ids, extras=extras)


_TOKENS: Final = ""  # no column has this name


def _pieces(
    stored: StoredTurns, turn: int, declared: Sequence[DeclaredColumn]
) -> dict[str, ExtraPiece]:
    """Return the tokens and the declared columns of a turn."""
    own = {column.name: own_piece(stored, turn, column=column) for column in declared}
    return {_TOKENS: ExtraPiece(stored.shared_tokens[turn], stored.token_ids[turn]), **own}


def _moved(piece: ExtraPiece, above: ExtraPiece) -> ExtraPiece:
    """Return the values of a turn after the parent of its parent; `above` is its parent.

    >>> values = np.arange(9)
    >>> num_shared, moved = _moved(ExtraPiece(5, values[5:]), ExtraPiece(3, values[3:7]))
    >>> num_shared, moved.tolist()
    (3, [3, 4, 5, 6, 7, 8])
    """
    num_values = piece.num_shared - above.num_shared
    if num_values <= 0:
        return piece
    if num_values > len(above.values):
        most = above.num_shared + len(above.values)
        raise InvalidTurnError("shared_tokens", f"{piece.num_shared} values of a turn with {most}")
    return ExtraPiece(above.num_shared, np.concatenate((above.values[:num_values], piece.values)))
