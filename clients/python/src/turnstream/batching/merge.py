"""Merge the turns of a trajectory into rows, and cut rows into turns again.

With O for observed and A for sampled tokens, and one turn in each pair of brackets::

    (O1, A1) (O1 A1 O2, A2)                  ->  O1 A1 O2 A2       one row
    (O1, A1) (O3, A3)                        ->  O1 A1 | O3 A3     the context was edited: two
    (O1, A1) (O1 A1 O2, A2) (O1 A1 O3, A3)   ->  O1 A1 O2 A2 | O1 A1 O3 A3
                                                 a branch: A1 is trained in the first row alone,
                                                 and is prompt in the second

Turns form a tree: each names the earlier turn that holds the longest beginning of its prompt, found
by comparing token ids. A turn joins the row of that turn if the row ends there and the prompt goes
on behind all of it. Sampled tokens are trained exactly once, whatever the split.
"""

from __future__ import annotations

import collections.abc as abc
import itertools
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.columns import OBSERVED, RowPieces, stored_row, token_columns
from turnstream.batching.extras import (
    ExtraIndex,
    MergedRow,
    merged_sequence_columns,
    require_declared,
    split_columns,
)
from turnstream.batching.plan import SequenceShape
from turnstream.batching.prefix import PrefixIndex
from turnstream.types import DeclaredColumn, Sequence, StoredTurn, Turn, TurnShape, VersionRun


def plan_sequences(shapes: abc.Sequence[TurnShape], *, merge: bool) -> tuple[SequenceShape, ...]:
    """The rows that these turns make, by their lengths alone, ordered by first turn.

    Args:
        shapes: the turns of one trajectory, in order.
        merge: False gives every turn a row of its own.
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
    """What is sent of every turn: the tokens that no earlier turn of the trajectory holds.

    Args:
        turns: of one trajectory, in order.
        extra_columns: what the run declares, in order of name.

    Raises:
        InvalidTurnError: an extra column is not as declared.
    """
    known, extras = PrefixIndex(), ExtraIndex(extra_columns)
    stored: list[StoredTurn] = []
    for index, turn in enumerate(turns):
        match = known.link(turn.prompt_ids)
        linked = extras.link(turn, match)
        known.add(match, turn.prompt_ids, turn.response_ids)
        extras.add(turn, linked)
        parent_turn, shared_tokens = linked.match
        stored.append(
            StoredTurn(
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
            )
        )
    return stored


def turn_prompts(stored: abc.Sequence[StoredTurn]) -> list[NDArray[np.int32]]:
    """int32 (P,) per turn, the full prompts: what `store_turns` took away, put back."""
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
    """The rows of one trajectory, given the full prompt of every turn, ordered by first turn.

    A prompt that extends everything so far continues its row; any difference, or a shorter prompt,
    starts a new one. Arrays of the rows are views of shared buffers.

    Args:
        turns: of one trajectory, in order.
        extra_columns: what the run declares, in order of name: `turnstream.batching.extras` says
            what a merged row has of them.

    Raises:
        InvalidTurnError: an array has another length than its response, or an extra column is not
            as declared.
        UnmergeableColumnError: turns of a row differ in a column that has one value per row.
    """
    return merge_trajectories([turns], extra_columns=extra_columns)[0]


def merge_trajectories(
    trajectories: abc.Iterable[abc.Sequence[Turn]],
    *,
    extra_columns: abc.Sequence[DeclaredColumn] = (),
) -> list[list[Sequence]]:
    """`merge_turns` of many trajectories, which share the buffers; several times faster."""
    if extra_columns:
        return _merged_with_extras(trajectories, extra_columns)
    merged = [_merged_rows(turns) for turns in trajectories]
    rows = iter(_sequences([row for rows in merged for row in rows]))
    return [list(itertools.islice(rows, len(rows_of_one))) for rows_of_one in merged]


def _merged_with_extras(
    trajectories: abc.Iterable[abc.Sequence[Turn]], declared: abc.Sequence[DeclaredColumn]
) -> list[list[Sequence]]:
    """By way of what is stored, where a turn's items decide as well which row it joins."""
    merged: list[list[RowPieces]] = []
    with_stored: list[MergedRow] = []
    for turns in trajectories:
        stored = store_turns(turns, extra_columns=declared)
        planned = plan_sequences([turn.shape for turn in stored], merge=True)
        merged.append([stored_row(stored, row.turns) for row in planned])
        with_stored += [
            MergedRow(stored, row.turns, pieces.spans, row.num_tokens)
            for row, pieces in zip(planned, merged[-1], strict=True)
        ]
    rows = zip(
        _sequences([row for rows in merged for row in rows]),
        merged_sequence_columns(with_stored, declared),
        strict=True,
    )
    whole = iter([replace(row, extras=columns) for row, columns in rows])
    return [list(itertools.islice(whole, len(rows_of_one))) for rows_of_one in merged]


def _merged_rows(turns: abc.Sequence[Turn]) -> list[RowPieces]:
    known = PrefixIndex()
    rows: list[RowPieces] = []
    members: list[list[int]] = []
    row_ending_in: dict[int, int] = {}
    num_tokens: list[int] = []
    for index, turn in enumerate(turns):
        if turn.extras:
            require_declared(turn, ())
        prompt_ids, response_ids = turn.prompt_ids, turn.response_ids
        parent, shared = match = known.link(prompt_ids)
        if index + 1 < len(turns):
            known.add(match, prompt_ids, response_ids)
        place = row_ending_in.get(parent)
        if place is not None and shared == num_tokens[parent]:
            del row_ending_in[parent]
        else:
            place, shared = len(rows), 0
            members.append([])
            rows.append(RowPieces(len(prompt_ids), [], [], members[place], []))
        row = rows[place]
        begin = len(prompt_ids) - row.prompt_length
        row.ids.extend((prompt_ids[shared:], response_ids))
        row.turns.append(turn)
        row.spans.append((begin, begin + len(response_ids)))
        members[place].append(index)
        row_ending_in[index] = place
        num_tokens.append(len(prompt_ids) + len(response_ids))
    return rows


def _sequences(rows: abc.Sequence[RowPieces]) -> abc.Iterator[Sequence]:
    if not rows:
        return
    columns = token_columns(rows)
    logprobs = itertools.repeat(None) if columns.logprobs is None else iter(columns.logprobs)
    for row, input_ids, loss_mask, rewards, versions, counts in zip(
        rows,
        columns.input_ids,
        columns.loss_mask,
        columns.rewards,
        columns.run_versions,
        columns.run_counts,
        strict=True,
    ):
        yield Sequence(
            turns=tuple(row.indices),
            input_ids=input_ids,
            prompt_length=row.prompt_length,
            loss_mask=loss_mask,
            logprobs=next(logprobs),
            rewards=rewards,
            version_runs=_version_runs(versions, counts),
            turn_spans=tuple(row.spans),
        )


def split_sequences(sequences: abc.Sequence[Sequence]) -> list[Turn]:
    """The turns that were merged into the rows of a trajectory, in order.

    What `merge_turns` cannot tell apart comes back in its plain form: a mask of ones for none,
    rewards of zero for none, neighbouring runs of one version as one run. A turn without
    log-probabilities has none again, unless it has no trained token and its row has them. Extra
    columns come back as each turn said them of its whole prompt: a column that a turn left out is
    there if its row has values for it, and one without values is left out.
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
