"""Rows of a plan from the payload of its trajectories."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.advantages import broadcast_turns
from turnstream.batching.columns import RowPieces, TokenColumns, stored_row, token_columns
from turnstream.batching.joining import (
    joined_column,
    joined_extras,
    joined_operations,
    picked_column,
    picked_extras,
)
from turnstream.batching.masking import masked_columns
from turnstream.batching.merged_extras import MergedRow, merged_columns
from turnstream.batching.plan import GroupPlan, SequenceShape, TrajectoryPlan
from turnstream.errors import BatchingError, CorruptRecordError
from turnstream.types import (
    DeclaredColumn,
    ExtraColumn,
    OperationColumns,
    Ragged,
    Rows,
    StoredTurn,
    TrajectoryKey,
)

Value = TypeVar("Value")


def assemble_rows(
    groups: Sequence[GroupPlan],
    payload: Mapping[TrajectoryKey, Sequence[StoredTurn]],
    *,
    first_row_id: int,
    extra_columns: Sequence[DeclaredColumn] = (),
    masked_versions: Collection[int] = (),
) -> Rows:
    """The rows of these groups: merged, in the order of the plan, ids from `first_row_id` on.

    `logprobs` is None if no turn has any. Where some have and others not, those without have NaN
    at their trained tokens and 0.0 at the others. `advantages` is None if no turn has one of its
    own. A turn's tokens are trained in one row, however many others have them in their prompts.

    Args:
        groups: of a mini-batch, or consecutive ones of it.
        payload: every turn of every trajectory of these groups, in order.
        first_row_id: of the first row.
        extra_columns: what the run declares, in order of name. All rows have all of them.
        masked_versions: of the plan.

    Raises:
        CorruptRecordError: the payload is not the one that was planned.
        InvalidTurnError: a turn's arrays disagree with one another or with the declarations.
        UnmergeableColumnError: turns of a row differ in a column that has one value per row.
    """
    trajectories = [(group, trajectory) for group in groups for trajectory in group.trajectories]
    pieces: list[RowPieces] = []
    for _, trajectory in trajectories:
        turns = payload[trajectory.key]
        _check_payload(trajectory, turns)
        pieces.extend([stored_row(turns, row.turns) for row in trajectory.sequences])
    planned = [(t, row) for _, t in trajectories for row in t.sequences]
    is_masked = [trajectory.is_masked for trajectory, _ in planned]
    columns = masked_columns(
        token_columns(pieces), is_masked=is_masked, masked_versions=masked_versions
    )
    _check_lengths(planned, pieces, columns)
    rows = _rows(trajectories, columns, planned=planned, first_row_id=first_row_id)
    rows = replace(rows, advantages=_turn_advantages(planned, pieces, columns))
    if not extra_columns:
        return rows
    merged = [
        MergedRow(payload[trajectory.key], row.turns, piece.spans, row.num_tokens)
        for (trajectory, row), piece in zip(planned, pieces, strict=True)
    ]
    return replace(rows, extras=merged_columns(merged, extra_columns))


def concatenate_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, in order.

    Where only some parts have log-probabilities, the others get NaN at their trained tokens. Where
    only some have `advantages` or `token_weights`, those of the others are `advantage` and 1 at
    their trained tokens. Inert rows go with operations and extra columns that they do not have.

    Raises:
        BatchingError: there is no part, or only some parts with real rows have operations or an
            extra column, or not of one type and shape.
    """
    if not parts:
        raise BatchingError("no rows to concatenate")
    if len(parts) == 1:
        return parts[0]
    values: dict[str, Any] = {
        field.name: _concatenated([getattr(part, field.name) for part in parts])
        for field in fields(Rows)
        if field.name not in _OPTIONAL
    }
    for name, stand_in in _STAND_INS.items():
        columns = [getattr(part, name) for part in parts]
        filled = [stand_in(parts[i]) if c is None else c for i, c in enumerate(columns)]
        values[name] = None if all(c is None for c in columns) else joined_column(filled)
    return Rows(**values, operations=joined_operations(parts), extras=joined_extras(parts))


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
        planned, pieces, lengths, columns.num_trained(), strict=True
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
        weight=np.array([weight for _, t in trajectories for weight in t.weights], np.float32),
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


def _turn_advantages(
    planned: Sequence[tuple[TrajectoryPlan, SequenceShape]],
    pieces: Sequence[RowPieces],
    columns: TokenColumns,
) -> Ragged[np.float32] | None:
    """Those of the turns at their tokens; of a trajectory whose turns have none, its own."""
    if not any(trajectory.turn_advantages for trajectory, _ in planned):
        return None
    values = [
        trajectory.turn_advantages[turn] if trajectory.turn_advantages else trajectory.advantage
        for trajectory, row in planned
        for turn in row.turns
    ]
    ends = [end for piece in pieces for _, end in piece.spans]
    offsets = np.cumsum([0, *[len(row.turns) for _, row in planned]]).astype(np.int32)
    return broadcast_turns(
        Ragged(np.array(values, np.float32), offsets),
        ends=Ragged(np.array(ends, np.int64), offsets),
        loss_mask=columns.loss_mask,
    )


def _group_totals(
    trajectories: Sequence[tuple[GroupPlan, TrajectoryPlan]], trained: Sequence[int]
) -> NDArray[np.int64]:
    totals: dict[str, int] = {}
    for (group, _), count in zip(trajectories, trained, strict=True):
        totals[group.group_id] = totals.get(group.group_id, 0) + count
    return np.array([totals[group.group_id] for group, _ in trajectories], np.int64)


def _logprobs(rows: Rows) -> Ragged[np.float32]:
    missing = np.where(rows.loss_mask.values, np.float32(np.nan), np.float32(0))
    return Ragged(missing, rows.loss_mask.offsets)


def _advantages(rows: Rows) -> Ragged[np.float32]:
    mask = rows.loss_mask
    per_token = np.repeat(rows.advantage, mask.lengths)
    trained = mask.values[mask.offsets[0] : mask.offsets[-1]]
    return Ragged(np.where(trained, per_token, np.float32(0)), mask.offsets - mask.offsets[0])


def _token_weights(rows: Rows) -> Ragged[np.float32]:
    return Ragged(rows.loss_mask.values.astype(np.float32), rows.loss_mask.offsets)


_STAND_INS: dict[str, Callable[[Rows], Ragged[np.float32]]] = {
    "logprobs": _logprobs,
    "advantages": _advantages,
    "token_weights": _token_weights,
}
_OPTIONAL = (*_STAND_INS, "operations", "extras")


def _concatenated(columns: Sequence[Any]) -> Any:
    if isinstance(columns[0], Ragged):
        return joined_column(columns)
    if isinstance(columns[0], np.ndarray):
        return np.concatenate(columns)
    return [text for column in columns for text in column]


def _taken(column: Any, positions: NDArray[np.int64]) -> Any:
    if isinstance(column, Ragged):
        return picked_column(cast("Ragged[Any]", column), positions)
    if isinstance(column, np.ndarray):
        return cast("NDArray[Any]", column)[positions]
    if isinstance(column, OperationColumns):
        return OperationColumns(
            **{f.name: _taken(getattr(column, f.name), positions) for f in fields(column)}
        )
    if isinstance(column, Mapping):
        return picked_extras(cast("Mapping[str, ExtraColumn]", column), positions)
    return None if column is None else [column[row] for row in positions.tolist()]
