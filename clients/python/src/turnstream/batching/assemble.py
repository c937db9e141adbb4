"""Rows of a plan from the payload of its trajectories."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.columns import RowPieces, TokenColumns, stored_row, token_columns
from turnstream.batching.plan import GroupPlan, SequenceShape, TrajectoryPlan
from turnstream.errors import BatchingError, CorruptRecordError
from turnstream.types import Ragged, Rows, StoredTurn, TrajectoryKey

Value = TypeVar("Value")


def assemble_rows(
    groups: Sequence[GroupPlan],
    payload: Mapping[TrajectoryKey, Sequence[StoredTurn]],
    *,
    first_row_id: int,
) -> Rows:
    """The rows of these groups: merged, in the order of the plan, ids from `first_row_id` on.

    `logprobs` is None if no turn has any. Where some have and others not, those without have NaN
    at their trained tokens and 0.0 at the others.

    Args:
        groups: of a mini-batch, or consecutive ones of it.
        payload: every turn of every trajectory of these groups, in order.
        first_row_id: of the first row.

    Raises:
        CorruptRecordError: the payload is not the one that was planned.
        InvalidTurnError: a turn's arrays disagree with one another.
    """
    trajectories = [(group, trajectory) for group in groups for trajectory in group.trajectories]
    pieces: list[RowPieces] = []
    for _, trajectory in trajectories:
        turns = payload[trajectory.key]
        _check_payload(trajectory, turns)
        pieces.extend([stored_row(turns, row.turns) for row in trajectory.sequences])
    columns = token_columns(pieces)
    planned = [(t, row) for _, t in trajectories for row in t.sequences]
    _check_lengths(planned, pieces, columns)
    return _rows(trajectories, columns, planned=planned, first_row_id=first_row_id)


def concatenate_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, in order.

    Where only some parts have log-probabilities, the others get NaN at their trained tokens.

    Raises:
        BatchingError: there is no part.
    """
    if not parts:
        raise BatchingError("no rows to concatenate")
    if len(parts) == 1:
        return parts[0]
    values = {
        field.name: _concatenated([getattr(part, field.name) for part in parts])
        for field in fields(Rows)
        if field.name != "logprobs"
    }
    if all(part.logprobs is None for part in parts):
        return Rows(**values, logprobs=None)
    return Rows(**values, logprobs=_concatenated([_logprobs(part) for part in parts]))


def take_rows(rows: Rows, positions: Sequence[int]) -> Rows:
    """The rows at these positions, in this order."""
    index = np.array(positions, np.int64)
    return Rows(**{field.name: _taken(getattr(rows, field.name), index) for field in fields(Rows)})


def _check_payload(trajectory: TrajectoryPlan, turns: Sequence[StoredTurn]) -> None:
    found = tuple([turn.payload_crc for turn in turns])
    if found != trajectory.payload_crcs:
        raise CorruptRecordError(
            f"{trajectory.key}: {len(found)} turns with checksums {found[:4]}, planned were "
            f"{len(trajectory.payload_crcs)} with {trajectory.payload_crcs[:4]}"
        )


def _check_lengths(
    planned: Sequence[tuple[TrajectoryPlan, SequenceShape]],
    pieces: Sequence[RowPieces],
    columns: TokenColumns,
) -> None:
    lengths = columns.input_ids.lengths.tolist()
    for (trajectory, row), piece, num_tokens, trained in zip(
        planned, pieces, lengths, columns.num_trained, strict=True
    ):
        found = piece.prompt_length, num_tokens, trained
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
        weight=np.array(repeated(lambda _, t: t.weight), np.float32),
        reward=np.array(repeated(lambda _, t: t.reward), np.float32),
        advantage=np.array(repeated(lambda _, t: t.advantage), np.float32),
        prompt_length=np.array([row.prompt_length for _, row in planned], np.int32),
        trajectory_num_tokens=np.repeat(np.array(trained, np.int64), num_rows),
        group_num_tokens=np.repeat(_group_totals(trajectories, trained), num_rows),
        input_ids=columns.input_ids,
        loss_mask=columns.loss_mask,
        logprobs=columns.logprobs,
        rewards=columns.rewards,
        run_versions=columns.run_versions,
        run_counts=columns.run_counts,
    )


def _group_totals(
    trajectories: Sequence[tuple[GroupPlan, TrajectoryPlan]], trained: Sequence[int]
) -> NDArray[np.int64]:
    totals: dict[str, int] = {}
    for (group, _), count in zip(trajectories, trained, strict=True):
        totals[group.group_id] = totals.get(group.group_id, 0) + count
    return np.array([totals[group.group_id] for group, _ in trajectories], np.int64)


def _logprobs(rows: Rows) -> Ragged[np.float32]:
    if rows.logprobs is not None:
        return rows.logprobs
    missing = np.where(rows.loss_mask.values, np.float32(np.nan), np.float32(0))
    return Ragged(missing, rows.loss_mask.offsets)


def _concatenated(columns: Sequence[Any]) -> Any:
    if isinstance(columns[0], Ragged):
        return _joined(columns)
    if isinstance(columns[0], np.ndarray):
        return np.concatenate(columns)
    return [text for column in columns for text in column]


def _joined(columns: Sequence[Ragged[Any]]) -> Ragged[Any]:
    bounds = np.concatenate([[0], *[column.lengths for column in columns]]).cumsum()
    if bounds[-1] > np.iinfo(np.int32).max:
        raise BatchingError(f"{bounds[-1]} tokens in one mini-batch: offsets are int32")
    values = [column.values[column.offsets[0] : column.offsets[-1]] for column in columns]
    return Ragged(np.concatenate(values), bounds.astype(np.int32))


def _taken(column: Any, positions: NDArray[np.int64]) -> Any:
    if isinstance(column, Ragged):
        return _picked(cast("Ragged[Any]", column), positions)
    if isinstance(column, np.ndarray):
        return cast("NDArray[Any]", column)[positions]
    return None if column is None else [column[row] for row in positions.tolist()]


def _picked(column: Ragged[Any], positions: NDArray[np.int64]) -> Ragged[Any]:
    starts = column.offsets[positions].tolist()
    stops = column.offsets[positions + 1].tolist()
    pieces = [column.values[start:stop] for start, stop in zip(starts, stops, strict=True)]
    offsets = np.zeros(len(pieces) + 1, np.int32)
    np.cumsum(column.lengths[positions], out=offsets[1:])
    values = np.concatenate(pieces) if pieces else column.values[:0]
    return Ragged(values, offsets)
