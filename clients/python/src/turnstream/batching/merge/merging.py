"""Merge the turns of a trajectory into rows.

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

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.merge.columns import OBSERVED, stored_row, token_columns
from turnstream.batching.merge.merged_extras import merged_columns
from turnstream.batching.merge.plan import SequenceShape
from turnstream.batching.merge.storing import store_turns
from turnstream.types import (
    DeclaredColumn,
    Sequence,
    StoredTurn,
    Turn,
    TurnShape,
    VersionRun,
)


def plan_sequences(shapes: abc.Sequence[TurnShape], *, merge: bool) -> tuple[SequenceShape, ...]:
    """Return the rows of these turns by their lengths alone, or without `merge` one per turn."""
    num_tokens = [shape.num_tokens for shape in shapes]
    rows: list[list[int]] = []
    row_ending_in: dict[int, list[int]] = {}
    for index, shape in enumerate(shapes):
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
    pieces = [stored_row(stored, row.turns) for row in planned]
    columns, extras = token_columns(pieces), merged_columns(pieces, extra_columns)
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
            turn_spans=tuple(pieces[number].spans),
            extras={name: column.values[number] for name, column in extras.items()},
        )
        for number, row in enumerate(planned)
    ]


def _version_runs(versions: NDArray[np.int64], counts: NDArray[np.int32]) -> tuple[VersionRun, ...]:
    return tuple(
        VersionRun(None if version == OBSERVED else version, count)
        for version, count in zip(versions.tolist(), counts.tolist(), strict=True)
    )
