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
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.columns import (
    OBSERVED,
    RowPieces,
    TokenColumns,
    stored_row,
    token_columns,
)
from turnstream.batching.extras import (
    ExtraIndex,
    MergedRow,
    merged_sequence_columns,
    require_declared,
    split_columns,
)
from turnstream.batching.plan import SequenceShape
from turnstream.batching.prefix import PrefixIndex, PrefixMatch, require_int32
from turnstream.types import (
    NO_PARENT,
    DeclaredColumn,
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
        match = known.link_and_add(turn.prompt_ids, turn.response_ids)
        linked = extras.link(turn, match)
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
) -> MergedTrajectories:
    """`merge_turns` of many trajectories, into columns that they share; several times faster.

    Args:
        trajectories: the turns of each, in order.
        extra_columns: what the run declares, in order of name.

    Raises:
        InvalidTurnError: an array has another length than its response, or an extra column is not
            as declared.
        UnmergeableColumnError: turns of a row differ in a column that has one value per row.
        BatchingError: more tokens than int32 offsets can count.
    """
    if extra_columns:
        return _merged_with_extras(trajectories, extra_columns)
    return _merged([_merged_rows(turns) for turns in trajectories])


def _merged(
    trajectories: abc.Sequence[abc.Sequence[RowPieces]],
    extras: abc.Sequence[abc.Mapping[str, SequenceColumn]] = (),
) -> MergedTrajectories:
    rows = [row for rows in trajectories for row in rows]
    return MergedTrajectories(
        columns=token_columns(rows),
        prompt_lengths=[row.prompt_length for row in rows],
        turns=[row.indices for row in rows],
        turn_spans=[row.spans for row in rows],
        bounds=list(itertools.accumulate(map(len, trajectories), initial=0)),
        extras=extras,
    )


def _merged_with_extras(
    trajectories: abc.Iterable[abc.Sequence[Turn]], declared: abc.Sequence[DeclaredColumn]
) -> MergedTrajectories:
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
    return _merged(merged, merged_sequence_columns(with_stored, declared))


def _merged_rows(turns: abc.Sequence[Turn]) -> list[RowPieces]:
    parents = _Parents(turns)
    rows: list[RowPieces] = []
    row_ending_in: dict[tuple[int, int], RowPieces] = {}
    for index, turn in enumerate(turns):
        if turn.extras:
            require_declared(turn, ())
        prompt_length = len(turn.prompt_ids)
        ids = [turn.prompt_ids, turn.response_ids]
        # A match is the turn that ends there, and how far.
        row = row_ending_in.pop(parents.find(index), None)
        if row is None:
            row = RowPieces(prompt_length, ids, [], [], [])
            rows.append(row)
        else:
            row.ids[:] = ids  # the prompt holds all that came before
        row.turns.append(turn)
        row.indices.append(index)
        end = prompt_length + len(turn.response_ids)
        row.spans.append((prompt_length - row.prompt_length, end - row.prompt_length))
        row_ending_in[index, end] = row
    return rows


class _Parents:
    """What a PrefixIndex says of every turn of a trajectory, without one where it can be seen.

    Where the turn before is the longest so far, a prompt that goes on behind it shares nothing
    longer with another. One whose first token no turn begins with shares nothing at all. The index
    learns of the turns when neither is so.
    """

    def __init__(self, turns: abc.Sequence[Turn]) -> None:
        self._turns = turns
        self._index = PrefixIndex()
        self._num_indexed = 0
        self._firsts: set[int] = set()
        self._longest = 0  # tokens of a turn
        self._is_before_longest = False

    def find(self, index: int) -> PrefixMatch:
        """The match of a turn's prompt with the turns before it; asked for each in order."""
        turn = self._turns[index]
        prompt_ids, response_ids = turn.prompt_ids, turn.response_ids
        require_int32(prompt_ids, field="prompt_ids")
        require_int32(response_ids, field="response_ids")
        if not len(prompt_ids) or int(prompt_ids[0]) not in self._firsts:
            match = PrefixMatch(NO_PARENT, 0)
        elif self._is_before_longest and _goes_on_behind(self._turns[index - 1], prompt_ids):
            match = PrefixMatch(index - 1, self._longest)
        else:
            match = self._look_up(index)
        num_tokens = len(prompt_ids) + len(response_ids)
        if num_tokens:
            self._firsts.add(int((prompt_ids if len(prompt_ids) else response_ids)[0]))
        self._is_before_longest = num_tokens > self._longest
        self._longest = max(self._longest, num_tokens)
        return match

    def _look_up(self, index: int) -> PrefixMatch:
        for turn in self._turns[self._num_indexed : index]:
            self._index.link_and_add(turn.prompt_ids, turn.response_ids)
        self._num_indexed = index
        return self._index.link(self._turns[index].prompt_ids)


def _goes_on_behind(turn: Turn, prompt_ids: NDArray[np.int32]) -> bool:
    """Whether a prompt begins with all tokens of a turn: as bytes, compared without an array."""
    prompt = prompt_ids.tobytes()
    before, response = map(np.ascontiguousarray, (turn.prompt_ids, turn.response_ids))
    return prompt.startswith(before.data) and prompt.startswith(response.data, before.nbytes)


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
        turns: per row, indices in its trajectory of the turns merged into it.
        turn_spans: per row, begin and end of these turns' responses, in response tokens.
        bounds: the rows of trajectory k are `bounds[k]:bounds[k + 1]`.
        extras: per row, its extra columns by name; empty where none is declared.
    """

    columns: TokenColumns
    prompt_lengths: abc.Sequence[int]
    turns: abc.Sequence[abc.Sequence[int]]
    turn_spans: abc.Sequence[abc.Sequence[tuple[int, int]]]
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
            turns=tuple(self.turns[row]),
            input_ids=columns.input_ids[row],
            prompt_length=self.prompt_lengths[row],
            loss_mask=columns.loss_mask[row],
            logprobs=None if columns.logprobs is None else columns.logprobs[row],
            rewards=columns.rewards[row],
            version_runs=_version_runs(columns.run_versions[row], columns.run_counts[row]),
            turn_spans=tuple(self.turn_spans[row]),
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
