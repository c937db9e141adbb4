"""The token columns of rows, from the turns that they merge: one copy per column.

A row is a prompt, a response, then for every further turn its new prompt tokens and its response.
Turns hold exactly these pieces, so a column of all rows is one concatenation, however many turns
there are. Tokens observed between two responses have mask 0, log-probability 0.0, reward 0.0 and no
version.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.buffers import empty_in_one_piece
from turnstream.errors import BatchingError, InvalidTurnError
from turnstream.types import Ragged, StoredTurn, Turn

OBSERVED = -1
"""Written where a version run has no version."""


class RowPieces(NamedTuple):
    """One row, not yet copied together.

    Attributes:
        prompt_length: P, in tokens.
        ids: int32 pieces of prompt + response, in order.
        turns: the turns that it merges.
        indices: their places in the trajectory.
        spans: begin and end of every turn's own response, counted in response tokens.
    """

    prompt_length: int
    ids: list[NDArray[np.int32]]
    turns: list[Turn | StoredTurn]
    indices: list[int]
    spans: list[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedTurns:
    """The N turns of B rows, row by row, and where their responses stand; not yet copied together.

    Attributes:
        turns: N of them.
        ids: int32 pieces of the rows' prompt + response, in order.
        offsets: int32 (B + 1,), row b has the turns `offsets[b]:offsets[b + 1]`, one at least.
        prompt_length_B: int64 (B,), in tokens.
        spans_N2: int64 (N, 2), begin and end of every turn's own response, counted in the response
            tokens of its row; the first of a row begins at 0.
    """

    turns: Sequence[Turn | StoredTurn]
    ids: Sequence[NDArray[np.int32]]
    offsets: NDArray[np.int32]
    prompt_length_B: NDArray[np.int64]
    spans_N2: NDArray[np.int64]

    @property
    def response_length_B(self) -> NDArray[np.int64]:
        """int64 (B,), with the tokens observed between responses."""
        return self.spans_N2[self.offsets[1:] - 1, 1]

    @property
    def gap_N(self) -> NDArray[np.int64]:
        """int64 (N,), tokens observed between the response before in the row and this one."""
        gap_N = self.spans_N2[:, 0].copy()
        gap_N[1:] -= self.spans_N2[:-1, 1]
        gap_N[self.offsets[:-1]] = 0
        return gap_N

    @property
    def count_N(self) -> NDArray[np.int64]:
        """int64 (N,), response tokens."""
        return self.spans_N2[:, 1] - self.spans_N2[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenColumns:
    """Token columns of B rows, as in Rows."""

    input_ids: Ragged[np.int32]
    loss_mask: Ragged[np.uint8]
    logprobs: Ragged[np.float32] | None
    rewards: Ragged[np.float32]
    run_versions: Ragged[np.int64]
    run_counts: Ragged[np.int32]

    def num_trained(self) -> list[int]:
        """B numbers, response tokens with mask 1."""
        is_trained = Ragged(self.loss_mask.values.view(np.bool_), self.loss_mask.offsets)
        return [int(np.count_nonzero(row)) for row in is_trained]


def stored_row(stored: Sequence[StoredTurn], indices: Sequence[int]) -> RowPieces:
    """The row of a trajectory that merges these of its turns, each the parent of the next.

    Raises:
        InvalidTurnError: a turn claims tokens that its parents do not hold.
    """
    first = stored[indices[0]]
    ids = shared_pieces(stored, indices[0]) if first.shared_tokens else []
    num_tokens = first.shared_tokens
    prompt_length = num_tokens + len(first.token_ids) - first.num_response_tokens
    if len(indices) == 1:
        ids.append(first.token_ids)
        return RowPieces(
            prompt_length, ids, [first], list(indices), [(0, first.num_response_tokens)]
        )
    spans: list[tuple[int, int]] = []
    turns: list[Turn | StoredTurn] = []
    for index in indices:
        turn = stored[index]
        num_tokens += len(turn.token_ids)
        end = num_tokens - prompt_length
        spans.append((end - turn.num_response_tokens, end))
        ids.append(turn.token_ids)
        turns.append(turn)
    return RowPieces(prompt_length, ids, turns, list(indices), spans)


def shared_pieces(stored: Sequence[StoredTurn], index: int) -> list[NDArray[np.int32]]:
    """The prompt tokens that a turn takes over from earlier ones, as views, first to last.

    Raises:
        InvalidTurnError: the chain of parents does not hold that many tokens.
    """
    pieces: list[NDArray[np.int32]] = []
    missing, parent = stored[index].shared_tokens, stored[index].parent_turn
    while missing:
        if not 0 <= parent < index:
            raise InvalidTurnError("parent_turn", f"turn {index} follows turn {parent}")
        turn, index = stored[parent], parent
        own = missing - turn.shared_tokens
        if own > len(turn.token_ids):
            raise InvalidTurnError(
                "shared_tokens",
                f"{missing} tokens of turn {parent}, which has "
                f"{turn.shared_tokens + len(turn.token_ids)}",
            )
        if own > 0:
            pieces.append(turn.token_ids[:own])
            missing = turn.shared_tokens
        parent = turn.parent_turn
    pieces.reverse()
    return pieces


def token_columns(rows: Sequence[RowPieces]) -> TokenColumns:
    """Copy rows together.

    `logprobs` is None if no turn has any; a turn without, beside others, has NaN where it is
    trained and 0.0 elsewhere.

    Raises:
        InvalidTurnError: an array has another length than its response, or a value that its column
            cannot hold; version runs cover another number of tokens.
        BatchingError: more tokens than int32 offsets can count.
    """
    return placed_columns(placed_rows(rows))


def placed_rows(rows: Sequence[RowPieces]) -> PlacedTurns:
    """The turns of these rows, and where they stand."""
    num_turns = [len(row.turns) for row in rows]
    spans = itertools.chain.from_iterable([row.spans for row in rows])
    bounds = np.fromiter(itertools.chain.from_iterable(spans), np.int64, 2 * sum(num_turns))
    return PlacedTurns(
        turns=[turn for row in rows for turn in row.turns],
        ids=[piece for row in rows for piece in row.ids],
        offsets=np.cumsum([0, *num_turns]).astype(np.int32),
        prompt_length_B=np.array([row.prompt_length for row in rows], np.int64),
        spans_N2=bounds.reshape(-1, 2),
    )


def placed_columns(placed: PlacedTurns) -> TokenColumns:
    """Copy rows together: `token_columns` of turns whose places are known.

    Raises:
        InvalidTurnError: an array has another length than its response, or a value that its column
            cannot hold; version runs cover another number of tokens.
        BatchingError: more tokens than int32 offsets can count.
    """
    turns, gaps, counts = placed.turns, placed.gap_N.tolist(), placed.count_N.tolist()
    responses = _Responses(counts, _sampled(gaps, counts))
    bounds = _bounds(placed.response_length_B)
    id_bounds = _bounds(placed.prompt_length_B + placed.response_length_B)
    num_tokens = int(bounds[-1])
    has_logprobs = any(turn.logprobs is not None for turn in turns)
    ids, logprobs, rewards, mask = empty_in_one_piece(
        ((int(id_bounds[-1]),), np.int32),
        ((num_tokens if has_logprobs else 0,), np.float32),
        ((num_tokens,), np.float32),
        ((num_tokens,), np.uint8),
    )
    np.concatenate(placed.ids or [ids], out=ids)
    _write_mask(mask, turns, responses)
    _write_rewards(rewards, turns, responses)
    if has_logprobs:
        _write_logprobs(logprobs, turns, responses)
    versions, run_counts = _run_columns(placed, gaps, counts)
    return TokenColumns(
        input_ids=Ragged(ids, id_bounds),
        loss_mask=Ragged(mask, bounds),
        logprobs=Ragged(logprobs, bounds) if has_logprobs else None,
        rewards=Ragged(rewards, bounds),
        run_versions=versions,
        run_counts=run_counts,
    )


class _Responses(NamedTuple):
    """Where the values of N turns stand in a column of response tokens.

    Attributes:
        counts: N, response tokens.
        is_sampled: per token of the column, False where it was observed between two responses; None
            where no token was.
    """

    counts: list[int]
    is_sampled: NDArray[np.bool_] | None


def _sampled(gaps: list[int], counts: list[int]) -> NDArray[np.bool_] | None:
    if not any(gaps):
        return None
    pattern = np.tile(np.array([False, True]), len(counts))
    return np.repeat(pattern, np.array([gaps, counts], np.int64).T.ravel())


def _write_mask(
    into: NDArray[np.uint8], turns: Sequence[Turn | StoredTurn], responses: _Responses
) -> None:
    counts, is_sampled = responses
    masks = [turn.loss_mask for turn in turns]
    if all(mask is None for mask in masks):
        into[:] = 1 if is_sampled is None else is_sampled
        return
    ones = np.ones(max(counts), np.uint8)
    given = [
        ones[:count] if mask is None else mask for mask, count in zip(masks, counts, strict=True)
    ]
    _write(into, given, responses, field="loss_mask")
    if into.max(initial=0) > 1:
        raise _not_held(given, into.dtype, field="loss_mask")


def _write_logprobs(
    into: NDArray[np.float32], turns: Sequence[Turn | StoredTurn], responses: _Responses
) -> None:
    given = [
        _missing_logprobs(turn.loss_mask, count) if turn.logprobs is None else turn.logprobs
        for turn, count in zip(turns, responses.counts, strict=True)
    ]
    _write(into, given, responses, field="logprobs")


def _write_rewards(
    into: NDArray[np.float32], turns: Sequence[Turn | StoredTurn], responses: _Responses
) -> None:
    arrays = [turn.rewards for turn in turns]
    if all(array is None for array in arrays):
        into.fill(0)
        return
    zeros = np.zeros(max(responses.counts), np.float32)
    given = [
        zeros[:count] if array is None else array
        for array, count in zip(arrays, responses.counts, strict=True)
    ]
    _write(into, given, responses, field="rewards")


def _write(
    into: NDArray[Any], arrays: Sequence[NDArray[Any]], responses: _Responses, *, field: str
) -> None:
    """Concatenate the arrays, with zeros where tokens were observed.

    Between thousands of short responses it is cheaper to copy all of them together first and then
    to where they stand, than to copy thousands of short zeros as well.
    """
    counts, is_sampled = responses
    found = [*map(len, arrays)]
    if found != counts:
        at = next(i for i, count in enumerate(counts) if found[i] != count)
        raise InvalidTurnError(field, f"{found[at]} values for {counts[at]} response tokens")
    try:
        with np.errstate(over="raise"):
            if is_sampled is None:
                np.concatenate(arrays, out=into)
                return
            values = np.concatenate(arrays, dtype=into.dtype)
    except (TypeError, FloatingPointError) as error:
        raise _not_held(arrays, into.dtype, field=field) from error
    into.fill(0)
    into[is_sampled] = values


def _not_held(
    arrays: Sequence[NDArray[Any]], dtype: np.dtype[Any], *, field: str
) -> InvalidTurnError:
    """Which value of these arrays a column of this type cannot hold; a mask holds 0 and 1."""
    for array in [array for array in arrays if array.dtype.kind in "biuf"]:
        if dtype == np.uint8:
            wrong, why = np.flatnonzero((array != 0) & (array != 1)), "is neither 0 nor 1"
        else:
            wrong = np.flatnonzero(np.isfinite(array) & (np.abs(array) > np.finfo(dtype).max))
            why = f"is more than {dtype} can hold"
        if len(wrong):
            return InvalidTurnError(field, f"{array[wrong[0]]} at response token {wrong[0]} {why}")
    types = sorted({array.dtype.name for array in arrays} - {dtype.name})
    return InvalidTurnError(field, f"is {', '.join(types)}, not {dtype}")


def _missing_logprobs(loss_mask: NDArray[np.uint8] | None, count: int) -> NDArray[np.float32]:
    unknown = np.full(count, np.nan, np.float32)
    if loss_mask is not None:
        unknown[loss_mask == 0] = 0.0
    return unknown


def _run_columns(
    placed: PlacedTurns, gaps: list[int], counts: list[int]
) -> tuple[Ragged[np.int64], Ragged[np.int32]]:
    num_rows = len(placed.offsets) - 1
    given = [turn.version_runs for turn in placed.turns]
    if not any(given):
        lengths_B = placed.response_length_B
        return _joined_runs([OBSERVED] * num_rows, lengths_B, range(num_rows), num_rows=num_rows)
    versions: list[int] = []
    lengths = list[int]()
    num_runs: list[int] = []
    for own, gap, count in zip(given, gaps, counts, strict=True):
        if own and (covered := sum([length for _, length in own])) != count:
            raise InvalidTurnError("version_runs", f"{covered} of {count} response tokens")
        runs = ((None, gap), *own) if own else ((None, gap + count),)
        num_runs.append(len(runs))
        for version, length in runs:
            versions.append(OBSERVED if version is None else version)
            lengths.append(length)
    row_of_turn = np.repeat(np.arange(num_rows), np.diff(placed.offsets))
    return _joined_runs(versions, lengths, np.repeat(row_of_turn, num_runs), num_rows=num_rows)


def _joined_runs(
    versions: Sequence[int],
    lengths: Sequence[int] | NDArray[np.int64],
    rows: Sequence[int] | NDArray[np.int64],
    *,
    num_rows: int,
) -> tuple[Ragged[np.int64], Ragged[np.int32]]:
    """Neighbours of one version and one row as one run, and none without a token.

    Args:
        versions: n of them, of every run, ordered by row.
        lengths: n.
        rows: n.
        num_rows: some may have no run.
    """
    runs = np.array([versions, lengths, rows], np.int64)
    version_N, length_N, row_N = runs[:, runs[1] > 0]
    is_first = np.ones(len(row_N), np.bool_)
    is_first[1:] = (version_N[1:] != version_N[:-1]) | (row_N[1:] != row_N[:-1])
    first = np.flatnonzero(is_first)
    counts = np.add.reduceat(length_N, first) if len(first) else length_N
    bounds = np.searchsorted(row_N[first], np.arange(num_rows + 1)).astype(np.int32)
    return Ragged(version_N[first], bounds), Ragged(counts.astype(np.int32), bounds)


def _bounds(lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    if bounds[-1] > np.iinfo(np.int32).max:
        raise BatchingError(f"{bounds[-1]} tokens in one mini-batch: offsets are int32")
    return bounds.astype(np.int32)
