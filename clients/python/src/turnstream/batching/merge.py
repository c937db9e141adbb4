"""Merge the turns of a trajectory into rows, and cut rows into turns again.

With O for observed and A for sampled tokens, and one turn in each pair of brackets::

    (O1, A1) (O1 A1 O2, A2)                  ->  O1 A1 O2 A2       one row
    (O1, A1) (O3, A3)                        ->  O1 A1 | O3 A3     the context was edited: two
    (O1, A1) (O1 A1 O2, A2) (O1 A1 O3, A3)   ->  O1 A1 O2 A2 | O1 A1 O3 A3
                                                 a branch: A1 is trained in the first row alone,
                                                 and is prompt in the second

Turns form a tree: each names an earlier turn that holds a beginning of its prompt, found by
comparing token ids. A turn joins the row of that turn if the row ends there and the prompt goes on
behind all of it; of several such rows it is the longest, and of equal ones the newest. Sampled
tokens are trained exactly once, whatever the split.
"""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.anchors import anchor_hash
from turnstream.batching.columns import (
    OBSERVED,
    PlacedTurns,
    RowPieces,
    TokenColumns,
    placed_columns,
    placed_rows,
    stored_row,
)
from turnstream.batching.continuing import TurnIds, continued_turns, turn_ids
from turnstream.batching.declarations import require_declared
from turnstream.batching.extras import ExtraIndex, LinkedTurn
from turnstream.batching.merged_extras import MergedRow, merged_sequence_columns, split_columns
from turnstream.batching.plan import SequenceShape
from turnstream.batching.prefix import PrefixIndex
from turnstream.types import (
    NO_PARENT,
    DeclaredColumn,
    Ragged,
    Sequence,
    SequenceColumn,
    StoredTurn,
    Turn,
    TurnShape,
    VersionRun,
)


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
        linked = extras.link(turn, known.matches(turn.prompt_ids))
        known.add(linked.match, turn.prompt_ids, turn.response_ids)
        extras.add(turn, linked)
        stored.append(stored_turn(turn, linked, index=index))
    return stored


def stored_turn(turn: Turn, linked: LinkedTurn, *, index: int) -> StoredTurn:
    """Return the stored form of a turn: the tokens and values that no earlier turn holds.

    Args:
        turn: as the generator gave it.
        linked: its parent, and its pieces of extra columns.
        index: of the turn in its trajectory.
    """
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

    A prompt continues the longest row that it extends, and of equal ones the newest; any
    difference, or a shorter prompt, starts a new one. Arrays of the rows are views of shared
    buffers.

    Args:
        turns: of one trajectory, in order.
        extra_columns: what the run declares, in order of name: `turnstream.batching.extras` says
            what a merged row has of them.

    Raises:
        InvalidTurnError: an array has another length than its response, or a value that its column
            cannot hold; version runs cover another number of tokens; an extra column is not as
            declared.
        UnmergeableColumnError: turns of a row differ in a column that has one value per row.
    """
    return merge_trajectories([turns], extra_columns=extra_columns)[0]


def merge_trajectories(
    trajectories: abc.Iterable[abc.Sequence[Turn]],
    *,
    extra_columns: abc.Sequence[DeclaredColumn] = (),
) -> MergedTrajectories:
    """`merge_turns` of many trajectories, into columns that they share; several times faster.

    Args:
        trajectories: the turns of each, in order.
        extra_columns: what the run declares, in order of name.

    Raises:
        InvalidTurnError: an array has another length than its response, or a value that its column
            cannot hold; version runs cover another number of tokens; an extra column is not as
            declared.
        UnmergeableColumnError: turns of a row differ in a column that has one value per row.
        BatchingError: more tokens than int32 offsets can count.
    """
    if extra_columns:
        return _merged_with_extras(trajectories, extra_columns)
    each = [*trajectories]
    turns = [turn for own in each for turn in own]
    for turn in turns:
        if turn.extras:
            require_declared(turn, ())
    return _merged(turns, num_turns=[len(own) for own in each])


def _merged(turns: abc.Sequence[Turn], *, num_turns: abc.Sequence[int]) -> MergedTrajectories:
    """Of the turns of all trajectories, `num_turns` of each; only comparing goes turn by turn."""
    ids = turn_ids(
        [turn.prompt_ids for turn in turns],
        [turn.response_ids for turn in turns],
        num_turns=num_turns,
    )
    row_N = np.array(_row_numbers(continued_turns(ids)), np.int64)
    order = np.argsort(row_N, kind="stable")
    placed = _placed_turns(turns, ids, row_N=row_N, order=order)
    places = np.arange(len(turns)) - np.cumsum([0, *num_turns])[ids.trajectory_N]
    trajectory_B = ids.trajectory_N[order[placed.offsets[:-1]]]
    return MergedTrajectories(
        columns=placed_columns(placed),
        prompt_lengths=placed.prompt_length_B.tolist(),
        turns=Ragged(places[order], placed.offsets),
        turn_spans=Ragged(placed.spans_N2, placed.offsets),
        bounds=np.searchsorted(trajectory_B, np.arange(len(num_turns) + 1)).tolist(),
    )


def _row_numbers(continued: abc.Sequence[int]) -> list[int]:
    """Of every turn the number of its row; rows are numbered by their first turn.

    >>> _row_numbers([NO_PARENT, 0, NO_PARENT, 1])
    [0, 0, 1, 0]
    """
    numbers: list[int] = []
    num_rows = 0
    for parent in continued:
        if parent == NO_PARENT:
            numbers.append(num_rows)
            num_rows += 1
        else:
            numbers.append(numbers[parent])
    return numbers


def _placed_turns(
    turns: abc.Sequence[Turn], ids: TurnIds, *, row_N: NDArray[np.int64], order: NDArray[np.intp]
) -> PlacedTurns:
    """Every row with the ids of its last turn, whose prompt holds all that came before.

    Args:
        turns: N of them.
        ids: theirs.
        row_N: the number of each turn's row.
        order: N places, row by row.
    """
    offsets = np.cumsum([0, *np.bincount(row_N)]).astype(np.int32)
    prompt_length_B = ids.num_prompt_N[order[offsets[:-1]]]
    spans_N2 = np.stack((ids.num_prompt_N[order], ids.num_tokens_N[order]), axis=1)
    spans_N2 -= np.repeat(prompt_length_B, np.diff(offsets))[:, np.newaxis]
    places: list[int] = order.tolist()
    last_turns: list[int] = order[offsets[1:] - 1].tolist()
    return PlacedTurns(
        turns=[turns[place] for place in places],
        ids=[piece for last in last_turns for piece in (ids.prompts[last], ids.responses[last])],
        offsets=offsets,
        prompt_length_B=prompt_length_B,
        spans_N2=spans_N2,
    )


def _merged_with_extras(
    trajectories: abc.Iterable[abc.Sequence[Turn]], declared: abc.Sequence[DeclaredColumn]
) -> MergedTrajectories:
    """By way of what is stored, where a turn's items decide as well which row it joins."""
    rows: list[RowPieces] = []
    bounds = [0]
    with_stored: list[MergedRow] = []
    for turns in trajectories:
        stored = store_turns(turns, extra_columns=declared)
        planned = plan_sequences([turn.shape for turn in stored], merge=True)
        own = [stored_row(stored, row.turns) for row in planned]
        with_stored += [
            MergedRow(stored, row.turns, pieces.spans, row.num_tokens)
            for row, pieces in zip(planned, own, strict=True)
        ]
        rows += own
        bounds.append(len(rows))
    placed = placed_rows(rows)
    places = [place for row in rows for place in row.indices]
    return MergedTrajectories(
        columns=placed_columns(placed),
        prompt_lengths=placed.prompt_length_B.tolist(),
        turns=Ragged(np.array(places, np.int64), placed.offsets),
        turn_spans=Ragged(placed.spans_N2, placed.offsets),
        bounds=bounds,
        extras=merged_sequence_columns(with_stored, declared),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MergedTrajectories(abc.Sequence[list[Sequence]]):
    """Rows of many trajectories in shared columns; those of one are cut out when asked for.

    >>> turn = Turn(prompt_ids=np.array([1, 2], np.int32), response_ids=np.array([3], np.int32))
    >>> merged = merge_trajectories([[turn], []])
    >>> [len(rows) for rows in merged], merged[0][0].input_ids.tolist()
    ([1, 0], [1, 2, 3])

    Attributes:
        columns: of all rows, one trajectory after the other; rows ordered by first turn.
        prompt_lengths: of every row, in tokens.
        turns: int64, per row the indices in its trajectory of the turns merged into it.
        turn_spans: int64, per row begin and end of these turns' responses, in response tokens.
        bounds: the rows of trajectory k are `bounds[k]:bounds[k + 1]`.
        extras: per row, its extra columns by name; empty where none is declared.
    """

    columns: TokenColumns
    prompt_lengths: abc.Sequence[int]
    turns: Ragged[np.int64]
    turn_spans: Ragged[np.int64]
    bounds: abc.Sequence[int]
    extras: abc.Sequence[abc.Mapping[str, SequenceColumn]] = ()

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @overload
    def __getitem__(self, index: int) -> list[Sequence]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[Sequence]]: ...
    def __getitem__(self, index: int | slice) -> list[Sequence] | list[list[Sequence]]:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        trajectory = range(len(self))[index]
        rows = range(self.bounds[trajectory], self.bounds[trajectory + 1])
        return [self._sequence(row) for row in rows]

    def _sequence(self, row: int) -> Sequence:
        columns = self.columns
        return Sequence(
            turns=tuple(self.turns[row].tolist()),
            input_ids=columns.input_ids[row],
            prompt_length=self.prompt_lengths[row],
            loss_mask=columns.loss_mask[row],
            logprobs=None if columns.logprobs is None else columns.logprobs[row],
            rewards=columns.rewards[row],
            version_runs=_version_runs(columns.run_versions[row], columns.run_counts[row]),
            turn_spans=tuple([(begin, end) for begin, end in self.turn_spans[row].tolist()]),
            extras=self.extras[row] if self.extras else {},
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
