"""Rows of a plan from the payload of its trajectories."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.merge.buffers import offsets_of
from turnstream.batching.merge.columns import (
    RowPieces,
    TokenColumns,
    masked_columns,
    stored_row,
    token_columns,
)
from turnstream.batching.merge.merged_extras import MergedRow, merged_columns
from turnstream.batching.merge.plan import GroupPlan, SequenceShape, TrajectoryPlan
from turnstream.batching.scoring.advantages import broadcast_turns
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
from turnstream.types.extras import ROUTE_DTYPES

Value = TypeVar("Value")


def assemble_rows(
    groups: Sequence[GroupPlan],
    payload: Mapping[TrajectoryKey, Sequence[StoredTurn]],
    *,
    first_row_id: int,
    extra_columns: Sequence[DeclaredColumn] = (),
    masked_versions: Collection[int] = (),
) -> Rows:
    """Return the merged rows of these groups in the plan's order, with ids from `first_row_id`.

    `logprobs` is None if no turn has any, otherwise NaN at trained tokens of turns without.
    `advantages` is None if no turn has one of its own. All rows have all `extra_columns`, in order
    of name.
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
    """Return the rows of all parts, in order.

    Where only some parts have log-probabilities, the others get NaN at their trained tokens. Where
    only some have `advantages` or `token_weights`, the others get `advantage` and 1 at their
    trained tokens. Inert rows may lack operations and extra columns; other rows must agree in them.
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
    """Return the advantages of the turns at their tokens, else those of the trajectory."""
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


Scalar = TypeVar("Scalar", bound=np.generic)


def joined_column(columns: Sequence[Ragged[Scalar]]) -> Ragged[Scalar]:
    """The rows of all columns, in order."""
    offsets = offsets_of(np.concatenate([column.lengths for column in columns]))
    values = [column.values[column.offsets[0] : column.offsets[-1]] for column in columns]
    return Ragged(np.concatenate(values), offsets)


def picked_column(column: Ragged[Scalar], positions: NDArray[np.int64]) -> Ragged[Scalar]:
    """The rows at these positions, in this order."""
    starts = column.offsets[positions].tolist()
    stops = column.offsets[positions + 1].tolist()
    pieces = [column.values[start:stop] for start, stop in zip(starts, stops, strict=True)]
    values = np.concatenate(pieces) if pieces else column.values[:0]
    return Ragged(values, offsets_of(column.lengths[positions]))


def picked_extras(
    extras: Mapping[str, ExtraColumn], positions: NDArray[np.int64]
) -> dict[str, ExtraColumn]:
    """The rows at these positions, of every column."""
    return {
        name: replace(column, values=picked_column(column.values, positions))
        for name, column in extras.items()
    }


def joined_operations(parts: Sequence[Rows]) -> OperationColumns | None:
    """Return the operation columns of all parts; inert rows have targets 0 of weight 0."""
    known = next((part.operations for part in parts if part.operations is not None), None)
    if known is None:
        return None
    shape = known.target_ids.values.shape[1:]
    columns: list[OperationColumns] = []
    for part in parts:
        own = part.operations or _inert_operations(part, shape=shape)
        if own.target_ids.values.shape[1:] != shape:
            raise BatchingError(
                f"target_ids have {own.target_ids.values.shape[1:]} and {shape} values per token"
            )
        columns.append(own)
    return OperationColumns(
        request_id=[text for own in columns for text in own.request_id],
        datum_index=np.concatenate([own.datum_index for own in columns]),
        target_ids=joined_column([own.target_ids for own in columns]),
        target_weights=joined_column([own.target_weights for own in columns]),
    )


def joined_extras(parts: Sequence[Rows]) -> dict[str, ExtraColumn]:
    """Return every extra column of all parts, sorted; inert rows without one have no values."""
    known = {name: column for part in reversed(parts) for name, column in part.extras.items()}
    return {name: _joined_extra(name, known[name], parts) for name in sorted(known)}


def _joined_extra(name: str, known: ExtraColumn, parts: Sequence[Rows]) -> ExtraColumn:
    columns: list[Ragged[Any]] = []
    for part in parts:
        own = part.extras.get(name) or _inert_extra(part, like=known, name=name)
        if _declaration(own) != _declaration(known):
            raise BatchingError(
                f"extra column {name!r} is {_declaration(own)} and {_declaration(known)}"
            )
        columns.append(own.values)
    return replace(known, values=joined_column(columns))


def _declaration(column: ExtraColumn) -> tuple[str, str, tuple[int, ...]]:
    dtype = column.dtype.name
    if column.per == "first_tokens" and dtype in ROUTE_DTYPES:
        dtype = "router choices"  # in the narrowest type of each part; joined in the widest
    return column.per, dtype, column.shape


def _inert_operations(part: Rows, *, shape: tuple[int, ...]) -> OperationColumns:
    _require_inert(part, lacking="operations")
    ids = part.input_ids
    offsets = ids.offsets - ids.offsets[0]
    return OperationColumns(
        request_id=[""] * len(part),
        datum_index=np.zeros(len(part), np.int32),
        target_ids=Ragged(np.zeros((offsets[-1], *shape), np.int64), offsets),
        target_weights=Ragged(np.zeros((offsets[-1], *shape), np.float32), offsets),
    )


def _inert_extra(part: Rows, *, like: ExtraColumn, name: str) -> ExtraColumn:
    _require_inert(part, lacking=f"extra column {name!r}")
    offsets = np.zeros(len(part) + 1, np.int32)
    return replace(like, values=Ragged(like.values.values[:0], offsets))


def _require_inert(part: Rows, *, lacking: str) -> None:
    real = np.flatnonzero(~part.is_padding)
    if len(real):
        raise BatchingError(f"row {part.row_id[real[0]]} has no {lacking}, others have")
