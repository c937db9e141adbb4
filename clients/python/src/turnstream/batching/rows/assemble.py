"""Rows of a plan from the payload of its trajectories."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.merge.buffers import offsets_of
from turnstream.batching.merge.columns import (
    MergedTurns,
    TokenColumns,
    masked_columns,
    merged_turns,
    token_columns,
)
from turnstream.batching.merge.left_out import without_left_out
from turnstream.batching.merge.merged_extras import merged_columns
from turnstream.batching.merge.plan import GroupPlan, SequenceShape, TrajectoryPlan
from turnstream.batching.scoring.advantages import broadcast_turns
from turnstream.errors import BatchingError, CorruptRecordError
from turnstream.types import (
    NO_PARENT,
    DeclaredColumn,
    Ragged,
    Rows,
    StoredTurns,
)

Value = TypeVar("Value")


def assemble_rows(
    groups: Sequence[GroupPlan],
    stored: StoredTurns,
    *,
    first_row_id: int,
    extra_columns: Sequence[DeclaredColumn] = (),
    masked_versions: Collection[int] = (),
) -> Rows:
    """Return the merged rows of these groups in the plan's order, with all `extra_columns`.

    `stored` has the turns of all trajectories, in the plan's order. `logprobs` is None if no turn
    has any, otherwise NaN at trained tokens of turns without. `advantages` is None if no turn has
    one of its own.
    """
    trajectories = [(group, trajectory) for group in groups for trajectory in group.trajectories]
    merged = _merged(stored, [trajectory for _, trajectory in trajectories], extra_columns)
    planned = [(t, row) for _, t in trajectories for row in t.sequences]
    is_masked = [trajectory.is_masked for trajectory, _ in planned]
    columns = token_columns(merged)
    _check_values(planned, merged, columns)
    columns = masked_columns(columns, is_masked=is_masked, masked_versions=masked_versions)
    _check_lengths(planned, merged, columns)
    rows = _rows(trajectories, columns, planned=planned, first_row_id=first_row_id)
    rows = replace(rows, advantages=_turn_advantages(planned, merged, columns))
    if not extra_columns:
        return rows
    return replace(rows, extras=merged_columns(merged, extra_columns))


def concatenate_rows(parts: Sequence[Rows]) -> Rows:
    """Return the rows of all parts, in order; they have the same columns."""
    if not parts:
        raise BatchingError("no rows to concatenate")
    if len(parts) == 1:
        return parts[0]
    return _each_column(parts, _joined, name="rows")


def take_rows(rows: Rows, positions: Sequence[int]) -> Rows:
    """Return the rows at these positions, in this order."""
    index = np.array(positions, np.int64)
    return _each_column([rows], lambda columns: _taken(columns, index), name="rows")


def _merged(
    stored: StoredTurns, plans: Sequence[TrajectoryPlan], declared: Sequence[DeclaredColumn]
) -> MergedTurns:
    """Return the planned rows of stored turns, which have the planned checksums."""
    planned = [crc for plan in plans for crc in plan.payload_crcs]
    if planned != [*stored.payload_crc]:
        raise CorruptRecordError(
            f"{len(stored.payload_crc)} turns with checksums {stored.payload_crc[:4]}, planned "
            f"were {len(planned)} with {planned[:4]}"
        )
    num_turns = [len(plan.payload_crcs) for plan in plans]
    firsts = [*itertools.accumulate(num_turns, initial=0)]
    parents_N = np.array(stored.parent_turn, np.int64)
    parents_N += np.where(parents_N == NO_PARENT, 0, np.repeat(firsts[:-1], num_turns))
    rows = [
        [first + turn for turn in row.turns]
        for first, plan in zip(firsts, plans, strict=False)
        for row in plan.sequences
    ]
    stored = stored._replace(parent_turn=parents_N.tolist())
    if sum(map(len, rows)) < len(planned):
        unused = {*range(len(planned))}.difference(*rows)
        stored = without_left_out(stored, unused, declared)
    return merged_turns(stored, rows)


def _check_values(
    planned: Sequence[tuple[TrajectoryPlan, SequenceShape]],
    merged: MergedTurns,
    columns: TokenColumns,
) -> None:
    """Refuse values that would make the gradient of a whole batch non-finite."""
    least = columns.input_ids.values.min(initial=0)
    if least < 0:
        raise CorruptRecordError(f"a turn has the token id {least}")
    num_missing = _num_missing(merged.turns, range(len(merged.turns.logprobs)))
    for name in ("rewards", "token_weights", "logprobs"):
        column: Ragged[np.float32] | None = getattr(columns, name)
        if column is None or _are_finite(column.values):
            continue
        num_allowed = num_missing if name == "logprobs" else 0
        if np.count_nonzero(~np.isfinite(column.values)) != num_allowed:
            raise CorruptRecordError(f"a turn has {name} that are not finite")
    weights = columns.token_weights
    if weights is not None and weights.values.min(initial=0) < 0:
        raise CorruptRecordError("a turn has token_weights below 0")
    for (trajectory, _), row in zip(planned, merged.rows, strict=True) if num_missing else ():
        if trajectory.has_logprobs and _num_missing(merged.stored, row):
            raise CorruptRecordError(f"{trajectory.key} lacks the logprobs that were sealed")


def _are_finite(values: NDArray[np.float32]) -> bool:
    return bool(np.isfinite(values.min(initial=0)) and np.isfinite(values.max(initial=0)))


def _num_missing(stored: StoredTurns, turns: Sequence[int]) -> int:
    """Return the number of trained tokens in those of the turns without log-probabilities."""
    missing = [turn for turn in turns if stored.logprobs[turn] is None]
    masks = [stored.loss_mask[turn] for turn in missing]
    return sum(
        stored.num_response_tokens[turn] if mask is None else int(np.count_nonzero(mask))
        for turn, mask in zip(missing, masks, strict=True)
    )


def _check_lengths(
    planned: Sequence[tuple[TrajectoryPlan, SequenceShape]],
    merged: MergedTurns,
    columns: TokenColumns,
) -> None:
    lengths = columns.input_ids.lengths.tolist()
    prompts = merged.prompt_lengths.tolist()
    for (trajectory, row), *shape in zip(
        planned, prompts, lengths, columns.num_trained(), strict=True
    ):
        found = tuple(shape)
        if found != row[1:]:
            raise CorruptRecordError(
                f"{trajectory.key}: a row of (prompt, all, trained) tokens {found}, "
                f"planned were {tuple(row[1:])}"
            )


def _rows(
    trajectories: Sequence[tuple[GroupPlan, TrajectoryPlan]],
    columns: TokenColumns,
    *,
    planned: Sequence[tuple[TrajectoryPlan, SequenceShape]],
    first_row_id: int,
) -> Rows:
    num_rows = [len(trajectory.sequences) for _, trajectory in trajectories]

    def repeated(values: Callable[[GroupPlan, TrajectoryPlan], Value]) -> list[Value]:
        per_trajectory = itertools.starmap(values, trajectories)
        return [
            value
            for value, count in zip(per_trajectory, num_rows, strict=True)
            for _ in range(count)
        ]

    index = [number for count in num_rows for number in range(count)]
    trained = [sum([row.num_trained_tokens for row in t.sequences]) for _, t in trajectories]
    return Rows(
        row_id=np.arange(first_row_id, first_row_id + len(planned), dtype=np.int64),
        trajectory_id=repeated(lambda _, t: t.key.trajectory_id),
        group_id=repeated(lambda group, _: group.group_id),
        prompt_uid=repeated(lambda group, _: group.prompt_uid),
        status=repeated(lambda _, t: str(t.status)),
        sample=np.array(repeated(lambda _, t: t.key.sample), np.int32),
        attempt=np.array(repeated(lambda _, t: t.key.attempt), np.int32),
        sequence_index=np.array(index, np.int32),
        is_last=np.array([n + 1 == count for count in num_rows for n in range(count)], np.bool_),
        is_padding=np.zeros(len(planned), np.bool_),
        weight=np.array([weight for _, t in trajectories for weight in t.weights], np.float32),
        reward=np.array(repeated(lambda _, t: t.reward), np.float32),
        advantage=np.array(repeated(lambda _, t: t.advantage), np.float32),
        prompt_length=np.array([row.prompt_length for _, row in planned], np.int32),
        trajectory_num_tokens=np.repeat(np.array(trained, np.int64), num_rows),
        group_num_tokens=np.repeat(_group_totals(trajectories, trained), num_rows),
        **{each.name: getattr(columns, each.name) for each in fields(columns)},
    )


def _turn_advantages(
    planned: Sequence[tuple[TrajectoryPlan, SequenceShape]],
    merged: MergedTurns,
    columns: TokenColumns,
) -> Ragged[np.float32] | None:
    """Return the advantages of the turns at their tokens, else those of the trajectory."""
    if not any(trajectory.turn_advantages for trajectory, _ in planned):
        return None
    values = [
        trajectory.turn_advantages[turn] if trajectory.turn_advantages else trajectory.advantage
        for trajectory, row in planned
        for turn in row.turns
    ]
    offsets = merged.offsets.astype(np.int32)
    return broadcast_turns(
        Ragged(np.array(values, np.float32), offsets),
        ends=Ragged(merged.spans[:, 1], offsets),
        loss_mask=columns.loss_mask,
    )


def _group_totals(
    trajectories: Sequence[tuple[GroupPlan, TrajectoryPlan]], trained: Sequence[int]
) -> NDArray[np.int64]:
    totals: dict[str, int] = {}
    for (group, _), count in zip(trajectories, trained, strict=True):
        totals[group.group_id] = totals.get(group.group_id, 0) + count
    return np.array([totals[group.group_id] for group, _ in trajectories], np.int64)


Scalar = TypeVar("Scalar", bound=np.generic)


def joined_column(columns: Sequence[Ragged[Scalar]]) -> Ragged[Scalar]:
    """Return the rows of all columns, in order."""
    offsets = offsets_of(np.concatenate([column.lengths for column in columns]))
    return Ragged(np.concatenate([column.flat().values for column in columns]), offsets)


def _each_column(values: Sequence[Any], change: Callable[[list[Any]], Any], *, name: str) -> Any:
    """Return a value like the given ones, whose columns are `change(columns)` of theirs."""
    first, *others = values
    for other in others:
        if _kind(other) != _kind(first):
            raise BatchingError(f"{name} to concatenate: {_kind(first)} and {_kind(other)}")
    if first is None or isinstance(first, str):
        return first
    if isinstance(first, Mapping):
        keys = cast("Mapping[str, Any]", first)
        return {k: _each_column([each[k] for each in values], change, name=k) for k in keys}
    if is_dataclass(first) and not isinstance(first, Ragged):
        names = [each.name for each in fields(first)]
        columns = {n: [getattr(each, n) for each in values] for n in names}
        return type(first)(**{n: _each_column(columns[n], change, name=n) for n in names})
    return change(list(values))


def _kind(column: Any) -> str:
    """Return what columns must have in common to be concatenated."""
    if isinstance(column, Ragged):
        values = cast("Ragged[Any]", column).values
        return f"{values.dtype}{list(values.shape[1:])}"
    if isinstance(column, Mapping):
        return f"the columns {sorted(cast('Mapping[str, Any]', column))}"
    return repr(column) if isinstance(column, str) else type(column).__name__


def _joined(columns: list[Any]) -> Any:
    if isinstance(columns[0], Ragged):
        return joined_column(columns)
    if isinstance(columns[0], np.ndarray):
        return np.concatenate(columns)
    return [text for column in columns for text in column]


def _taken(columns: list[Any], positions: NDArray[np.int64]) -> Any:
    (column,) = columns
    if isinstance(column, Ragged):
        return picked_column(cast("Ragged[Any]", column), positions)
    if isinstance(column, np.ndarray):
        return cast("NDArray[Any]", column)[positions]
    return [column[row] for row in positions.tolist()]


def picked_column(column: Ragged[Scalar], positions: NDArray[np.int64]) -> Ragged[Scalar]:
    """Return the rows at these positions, in this order."""
    starts = column.offsets[positions].tolist()
    stops = column.offsets[positions + 1].tolist()
    pieces = [column.values[start:stop] for start, stop in zip(starts, stops, strict=True)]
    values = np.concatenate(pieces) if pieces else column.values[:0]
    return Ragged(values, offsets_of(column.lengths[positions]))
