"""Merge the turns of a trajectory into rows, and cut rows into turns again.

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

from turnstream.batching.merge.anchors import anchor_hash
from turnstream.batching.merge.columns import OBSERVED, stored_row, token_columns
from turnstream.batching.merge.extras import ExtraIndex, LinkedTurn
from turnstream.batching.merge.merged_extras import (
    MergedRow,
    merged_sequence_columns,
    split_columns,
)
from turnstream.batching.merge.plan import SequenceShape
from turnstream.batching.merge.prefix import PrefixIndex
from turnstream.types import (
    DeclaredColumn,
    Sequence,
    StoredTurn,
    Turn,
    TurnShape,
    VersionRun,
)


def plan_sequences(shapes: abc.Sequence[TurnShape], *, merge: bool) -> tuple[SequenceShape, ...]:
    """Return the rows of these turns by their lengths alone, ordered by first turn.

    Without `merge`, every turn has a row of its own.
    """
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
        version_runs=turn.version_runs,
        extras=linked.pieces,
        anchor=anchor_hash(turn.anchor),
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
    columns = token_columns(pieces)
    merged = [
        MergedRow(stored, row.turns, own.spans, row.num_tokens)
        for row, own in zip(planned, pieces, strict=True)
    ]
    extras = merged_sequence_columns(merged, extra_columns)
    return [
        Sequence(
            turns=row.turns,
            input_ids=columns.input_ids[number],
            prompt_length=row.prompt_length,
            loss_mask=columns.loss_mask[number],
            logprobs=None if columns.logprobs is None else columns.logprobs[number],
            rewards=columns.rewards[number],
            version_runs=_version_runs(columns.run_versions[number], columns.run_counts[number]),
            turn_spans=tuple(pieces[number].spans),
            extras=extras[number],
        )
        for number, row in enumerate(planned)
    ]


def split_sequences(sequences: abc.Sequence[Sequence]) -> list[Turn]:
    """Return the turns that were merged into the rows of a trajectory, in order.

    Values that a row does not keep return in plain form: a mask of ones or rewards of 0 for none,
    and one run for neighbours of one version. A turn without log-probabilities has none again,
    unless it has no trained token.
    """
    turns: dict[int, Turn] = {}
    for sequence in sequences:
        spans = zip(sequence.turns, sequence.turn_spans, strict=True)
        for place, (index, (begin, end)) in enumerate(spans):
            response = sequence.prompt_length + begin, sequence.prompt_length + end
            turns[index] = Turn(
                prompt_ids=sequence.input_ids[: response[0]],
                response_ids=sequence.input_ids[slice(*response)],
                logprobs=_turn_logprobs(sequence, begin, end),
                loss_mask=sequence.loss_mask[begin:end],
                rewards=sequence.rewards[begin:end],
                version_runs=_cut_runs(sequence.version_runs, begin, end),
                extras=split_columns(
                    sequence.extras,
                    place=place,
                    prompt_length=sequence.prompt_length,
                    span=(begin, end),
                ),
            )
    return [turns[index] for index in sorted(turns)]


def _turn_logprobs(sequence: Sequence, begin: int, end: int) -> NDArray[np.float32] | None:
    if sequence.logprobs is None:
        return None
    logprobs = sequence.logprobs[begin:end]
    return None if np.isnan(logprobs).any() else logprobs


def _version_runs(versions: NDArray[np.int64], counts: NDArray[np.int32]) -> tuple[VersionRun, ...]:
    return tuple(
        VersionRun(None if version == OBSERVED else version, count)
        for version, count in zip(versions.tolist(), counts.tolist(), strict=True)
    )


def _cut_runs(runs: abc.Sequence[VersionRun], begin: int, end: int) -> tuple[VersionRun, ...]:
    """The runs of the tokens in [begin, end); none if no version is known there."""
    cut: list[VersionRun] = []
    start = 0
    for version, num_tokens in runs:
        stop = start + num_tokens
        count = min(stop, end) - max(start, begin)
        if count > 0:
            cut.append(VersionRun(version, count))
        start = stop
    return tuple(cut) if any(run.version is not None for run in cut) else ()
