"""Ragged, operation and extra columns of several parts as one, and of some rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from turnstream.errors import BatchingError
from turnstream.types import ExtraColumn, OperationColumns, Ragged, Rows
from turnstream.types.extras import ROUTE_DTYPES

Scalar = TypeVar("Scalar", bound=np.generic)


def joined_column(columns: Sequence[Ragged[Scalar]]) -> Ragged[Scalar]:
    """The rows of all columns, in order.

    Raises:
        BatchingError: more values than int32 offsets can count.
    """
    bounds = np.concatenate([[0], *[column.lengths for column in columns]]).cumsum()
    if bounds[-1] > np.iinfo(np.int32).max:
        raise BatchingError(f"{bounds[-1]} tokens in one mini-batch: offsets are int32")
    values = [column.values[column.offsets[0] : column.offsets[-1]] for column in columns]
    return Ragged(np.concatenate(values), bounds.astype(np.int32))


def picked_column(column: Ragged[Scalar], positions: NDArray[np.int64]) -> Ragged[Scalar]:
    """The rows at these positions, in this order."""
    starts = column.offsets[positions].tolist()
    stops = column.offsets[positions + 1].tolist()
    pieces = [column.values[start:stop] for start, stop in zip(starts, stops, strict=True)]
    offsets = np.zeros(len(pieces) + 1, np.int32)
    np.cumsum(column.lengths[positions], out=offsets[1:])
    values = np.concatenate(pieces) if pieces else column.values[:0]
    return Ragged(values, offsets)


def picked_extras(
    extras: Mapping[str, ExtraColumn], positions: NDArray[np.int64]
) -> dict[str, ExtraColumn]:
    """The rows at these positions, of every column."""
    return {
        name: replace(column, values=picked_column(column.values, positions))
        for name, column in extras.items()
    }


def joined_operations(parts: Sequence[Rows]) -> OperationColumns | None:
    """The operation columns of all parts; inert rows without have targets 0 of weight 0.

    Raises:
        BatchingError: only some parts with real rows have them, or their K differs.
    """
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
    """Every extra column of all parts, in order of name; inert rows without have no values.

    Raises:
        BatchingError: only some parts with real rows have a column, or its type or shape differs.
    """
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
