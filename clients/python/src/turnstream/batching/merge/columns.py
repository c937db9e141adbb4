"""The token columns of rows, from the turns that they merge: one copy per column.

Turns hold the pieces of a row in order, so a column of all rows is one concatenation. Tokens
observed between two responses have mask 0, log-probability 0.0, reward 0.0, weight 0.0 and no
version.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.merge.buffers import empty_in_one_piece, offsets_of
from turnstream.errors import InvalidTurnError
from turnstream.types import Ragged, StoredTurns, VersionRun

OBSERVED = -1
"""Written where a version run has no version."""


class MergedTurns(NamedTuple):
    """B rows of N turns, not yet copied together.

    Attributes:
        stored: all turns of the trajectories, with positions as `parent_turn`.
        rows: positions in `stored` of the turns of B rows, each the parent of the next.
        turns: the turns of all rows, in order.
        offsets: int64 (B + 1,), the turns of each row.
        prompt_lengths: int64 (B,), in tokens.
        spans: int64 (N, 2), begin and end of every turn's own response, counted in response tokens.
    """

    stored: StoredTurns
    rows: Sequence[Sequence[int]]
    turns: StoredTurns
    offsets: NDArray[np.int64]
    prompt_lengths: NDArray[np.int64]
    spans: NDArray[np.int64]

    def spans_of(self, row: int) -> list[tuple[int, int]]:
        """Return the spans of the turns of a row."""
        return [*map(tuple, self.spans[self.offsets[row] : self.offsets[row + 1]].tolist())]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenColumns:
    """Token columns of B rows, as in Rows."""

    input_ids: Ragged[np.int32]
    loss_mask: Ragged[np.uint8]
    logprobs: Ragged[np.float32] | None
    rewards: Ragged[np.float32]
    run_versions: Ragged[np.int64]
    run_counts: Ragged[np.int32]
    token_weights: Ragged[np.float32] | None = None

    def num_trained(self) -> list[int]:
        """B numbers, response tokens with mask 1."""
        mask = replace(self.loss_mask, values=self.loss_mask.values.view(np.bool_))
        return [int(np.count_nonzero(mask[row])) for row in range(len(mask))]


def merged_turns(stored: StoredTurns, rows: Sequence[Sequence[int]]) -> MergedTurns:
    """Return the rows that merge these turns, given as in MergedTurns."""
    turns = stored.taken([*itertools.chain.from_iterable(rows)])
    offsets = np.cumsum([0, *map(len, rows)])
    first_B, num_turns_B = offsets[:-1], np.diff(offsets)
    lengths_N = np.array([*map(len, turns.token_ids)], np.int64)
    counts_N = np.array(turns.num_response_tokens, np.int64)
    shared_B = np.array(turns.shared_tokens, np.int64)[first_B]
    ends_N = np.cumsum(lengths_N)
    ends_N -= np.repeat((ends_N - counts_N)[first_B], num_turns_B)
    return MergedTurns(
        stored=stored,
        rows=rows,
        turns=turns,
        offsets=offsets,
        prompt_lengths=shared_B + (lengths_N - counts_N)[first_B],
        spans=np.stack([ends_N - counts_N, ends_N], axis=1),
    )


def shared_pieces(stored: StoredTurns, turn: int) -> list[NDArray[np.int32]]:
    """Return the prompt tokens that a turn shares with earlier ones, as views, first to last."""

    def own(turn: int) -> tuple[int, NDArray[np.int32]]:
        return stored.shared_tokens[turn], stored.token_ids[turn]

    return whole_pieces(stored, turn, own, field="shared_tokens")[:-1]


def whole_pieces(
    stored: StoredTurns,
    turn: int,
    own: Callable[[int], tuple[int, NDArray[Any]]],
    *,
    field: str,
) -> list[NDArray[Any]]:
    """Return all values of a turn, those that it shares with earlier turns first, as views.

    `own` returns the number of values that a turn shares, and the values that it adds.
    """
    missing, values = own(turn)
    pieces = [values]
    while missing:
        turn, child = stored.parent_turn[turn], turn
        if not 0 <= turn < child:
            raise InvalidTurnError("parent_turn", f"turn {child} follows turn {turn}")
        num_shared, values = own(turn)
        num_own = missing - num_shared
        if num_own > len(values):
            num_values = num_shared + len(values)
            raise InvalidTurnError(
                field, f"{missing} values of turn {turn}, which has {num_values}"
            )
        if num_own > 0:
            pieces.append(values[:num_own])
            missing = num_shared
    pieces.reverse()
    return pieces


def token_columns(merged: MergedTurns) -> TokenColumns:
    """Copy rows together.

    `logprobs` is None if no turn has any. Otherwise a turn without has NaN at its trained tokens.
    `token_weights` is None if no turn has any. Otherwise the mask of a turn without is its weights.
    """
    turns, offsets = merged.turns, merged.offsets
    begins_N, ends_N = merged.spans.T
    gaps_N = begins_N.copy()
    gaps_N[1:] -= ends_N[:-1]
    gaps_N[offsets[:-1]] = 0
    counts_N = ends_N - begins_N
    is_sampled = _sampled(gaps_N, counts_N)
    lengths_B = ends_N[offsets[1:] - 1]
    bounds = offsets_of(lengths_B)
    id_bounds = offsets_of(lengths_B + merged.prompt_lengths)
    num_tokens = int(bounds[-1])
    has_logprobs = _is_any_given(turns.logprobs)
    has_weights = _is_any_given(turns.token_weights)
    ids, logprobs, rewards, mask, weights = empty_in_one_piece(
        ((int(id_bounds[-1]),), np.int32),
        ((num_tokens if has_logprobs else 0,), np.float32),
        ((num_tokens,), np.float32),
        ((num_tokens,), np.uint8),
        ((num_tokens if has_weights else 0,), np.float32),
    )
    np.concatenate([ids[:0], *_id_pieces(merged)], out=ids)
    _write(mask, turns, is_sampled, field="loss_mask")
    _write(rewards, turns, is_sampled, field="rewards")
    if has_logprobs:
        _write(logprobs, turns, is_sampled, field="logprobs")
    if has_weights:
        _write(weights, turns, is_sampled, field="token_weights")
    row_of_turn = np.repeat(np.arange(len(lengths_B)), np.diff(offsets))
    versions, run_counts = _run_columns(
        turns.version_runs, gaps_N, counts_N, row_of_turn, lengths_B
    )
    return TokenColumns(
        input_ids=Ragged(ids, id_bounds),
        loss_mask=Ragged(mask, bounds),
        logprobs=Ragged(logprobs, bounds) if has_logprobs else None,
        rewards=Ragged(rewards, bounds),
        token_weights=Ragged(weights, bounds) if has_weights else None,
        run_versions=versions,
        run_counts=run_counts,
    )


def _id_pieces(merged: MergedTurns) -> Sequence[NDArray[np.int32]]:
    """Return the pieces of prompt + response of all rows, in order."""
    own = merged.turns.token_ids
    if not np.array(merged.turns.shared_tokens)[merged.offsets[:-1]].any():
        return own
    pieces: list[NDArray[np.int32]] = []
    turns = iter(own)
    for row in merged.rows:
        pieces += shared_pieces(merged.stored, row[0])
        pieces += itertools.islice(turns, len(row))
    return pieces


def _is_any_given(arrays: Sequence[NDArray[Any] | None]) -> bool:
    return any(array is not None for array in arrays)


def _sampled(gaps_N: NDArray[np.int64], counts_N: NDArray[np.int64]) -> NDArray[np.bool_] | None:
    """Return, per response token, False where it was observed; None where none was."""
    if not gaps_N.any():
        return None
    pattern = np.tile(np.array([False, True]), len(counts_N))
    return np.repeat(pattern, np.stack([gaps_N, counts_N], axis=1).ravel())


def _write(
    into: NDArray[Any],
    turns: StoredTurns,
    is_sampled: NDArray[np.bool_] | None,
    *,
    field: str,
) -> None:
    """Concatenate the arrays of the turns, with zeros where tokens were observed.

    Thousands of short responses cost less in two copies than with thousands of short zeros.
    """
    given: Sequence[NDArray[Any] | None] = getattr(turns, field)
    if not _is_any_given(given):
        into[:] = 0 if field == "rewards" else 1 if is_sampled is None else is_sampled
        return
    arrays = [
        _missing(count, mask, field=field) if array is None else array
        for array, count, mask in zip(
            given, turns.num_response_tokens, turns.loss_mask, strict=True
        )
    ]
    counts = [*turns.num_response_tokens]
    if (found := [*map(len, arrays)]) != counts:
        turn = next(k for k, count in enumerate(counts) if found[k] != count)
        raise InvalidTurnError(field, f"{found[turn]} values for {counts[turn]} response tokens")
    try:
        with np.errstate(over="raise"):
            if is_sampled is None:
                np.concatenate(arrays, out=into)
            else:
                values = np.concatenate(arrays, dtype=into.dtype)
                into.fill(0)
                into[is_sampled] = values
    except (TypeError, FloatingPointError) as error:
        raise _unfit_value(arrays, into.dtype, field=field) from error
    if into.dtype == np.uint8 and into.max(initial=0) > 1:
        raise _unfit_value(arrays, into.dtype, field=field)


def _missing(count: int, mask: NDArray[np.uint8] | None, *, field: str) -> NDArray[Any]:
    """Return what stands for an array that a turn lacks, where another turn has one."""
    if field == "token_weights" and mask is not None:
        return mask
    if field in ("loss_mask", "token_weights"):
        return np.ones(count, np.uint8)
    if field == "rewards":
        return np.zeros(count, np.float32)
    unknown = np.full(count, np.nan, np.float32)
    if mask is not None:
        unknown[mask == 0] = 0.0
    return unknown


def _unfit_value(
    arrays: Sequence[NDArray[Any]], dtype: np.dtype[Any], *, field: str
) -> InvalidTurnError:
    """Name a value that a column of this type cannot hold; a mask holds 0 and 1."""
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


def _run_columns(
    given: Sequence[tuple[VersionRun, ...]],
    gaps_N: NDArray[np.int64],
    counts_N: NDArray[np.int64],
    row_of_turn: NDArray[np.int64],
    lengths_B: NDArray[np.int64],
) -> tuple[Ragged[np.int64], Ragged[np.int32]]:
    num_rows = len(lengths_B)
    if not any(given):
        return _joined_runs([OBSERVED] * num_rows, lengths_B, range(num_rows), num_rows=num_rows)
    own = [run for runs in given for run in runs]
    num_own_N = np.array([*map(len, given)], np.int64)
    lengths = np.array([run[1] for run in own], np.int64)
    turn_of_run = np.repeat(np.arange(len(given)), num_own_N)
    covered_N = np.bincount(turn_of_run, lengths, len(given)).astype(np.int64)
    wrong = np.flatnonzero((num_own_N > 0) & (covered_N != counts_N))
    if len(wrong):
        turn = int(wrong[0])
        raise InvalidTurnError(
            "version_runs", f"{covered_N[turn]} of {counts_N[turn]} response tokens"
        )
    # Each turn has a run of observed tokens before its own runs.
    starts_N = np.cumsum(num_own_N) - num_own_N
    observed_N = gaps_N + np.where(num_own_N > 0, 0, counts_N)
    versions = [OBSERVED if run[0] is None else run[0] for run in own]
    return _joined_runs(
        np.insert(np.array(versions, np.int64), starts_N, OBSERVED),
        np.insert(lengths, starts_N, observed_N),
        np.repeat(row_of_turn, num_own_N + 1),
        num_rows=num_rows,
    )


def _joined_runs(
    versions: Sequence[int] | NDArray[np.int64],
    lengths: NDArray[np.int64],
    rows: Sequence[int] | NDArray[np.int64],
    *,
    num_rows: int,
) -> tuple[Ragged[np.int64], Ragged[np.int32]]:
    """Join neighbours of one version and row into one run, and drop runs without a token."""
    runs = np.array([versions, lengths, rows], np.int64)
    version_N, length_N, row_N = runs[:, runs[1] > 0]
    is_first = np.ones(len(row_N), np.bool_)
    is_first[1:] = (version_N[1:] != version_N[:-1]) | (row_N[1:] != row_N[:-1])
    first = np.flatnonzero(is_first)
    counts = np.add.reduceat(length_N, first) if len(first) else length_N
    bounds = np.searchsorted(row_N[first], np.arange(num_rows + 1)).astype(np.int32)
    return Ragged(version_N[first], bounds), Ragged(counts.astype(np.int32), bounds)


def masked_columns(
    columns: TokenColumns, *, is_masked: Sequence[bool], masked_versions: Collection[int] = ()
) -> TokenColumns:
    """Return the columns with 0 at masked rows and versions: mask, log-probability and weight.

    `is_masked` has one value per row. The object is the same if nothing is masked.
    """
    if not any(is_masked) and not masked_versions:
        return columns
    is_live_B = ~np.array(is_masked, np.bool_)
    mask = columns.loss_mask
    kept = mask.values * np.repeat(is_live_B, mask.lengths)
    if masked_versions:
        is_old = np.isin(columns.run_versions.values, list(masked_versions))
        kept *= ~np.repeat(is_old, columns.run_counts.values)

    def masked(column: Ragged[np.float32] | None) -> Ragged[np.float32] | None:
        if column is None:
            return None
        return Ragged(np.where(kept, column.values, np.float32(0)), column.offsets)

    return replace(
        columns,
        loss_mask=Ragged(kept, mask.offsets),
        logprobs=masked(columns.logprobs),
        token_weights=masked(columns.token_weights),
    )
