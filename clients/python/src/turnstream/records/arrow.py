"""Conversion between numpy and Arrow, without a copy of numbers.

Values of more than one dimension are nested fixed-size lists: their type has the shape.
"""

# pyarrow has neither stubs nor annotations, so all its values are unknown to the checker.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from turnstream.errors import CorruptRecordError
from turnstream.types import Ragged


def list_of(values: pa.DataType) -> pa.DataType:
    """Return the type of a list of these values; its items are never null."""
    return pa.list_(pa.field("item", values, nullable=False))


def numbers_to_arrow(values: NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Return the numbers as Arrow; a view where they already have this type."""
    buffer = pa.py_buffer(np.ascontiguousarray(values, kind.to_pandas_dtype()))
    return pa.Array.from_buffers(kind, len(values), [None, buffer])


def nullable_to_arrow(
    values: NDArray[Any], kind: pa.DataType, *, is_valid: NDArray[np.bool_]
) -> pa.Array:
    """Return the numbers with nulls where they are not valid, and zeros under the nulls."""
    if is_valid.all():
        return numbers_to_arrow(values, kind)
    validity = pa.py_buffer(np.packbits(is_valid, bitorder="little"))
    filled = pa.py_buffer(np.where(is_valid, values, 0).astype(kind.to_pandas_dtype()))
    return pa.Array.from_buffers(kind, len(values), [validity, filled])


def list_to_arrow(offsets: NDArray[np.int32], values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return lists of type `kind`: row b is `values[offsets[b]:offsets[b + 1]]`."""
    buffer = pa.py_buffer(np.ascontiguousarray(offsets))
    return pa.Array.from_buffers(kind, len(offsets) - 1, [None, buffer], children=[values])


def compact(column: Ragged[Any]) -> Ragged[Any]:
    """Return the column in a buffer with its own rows alone.

    A slice of the Arrow array would also send some bytes of other rows.
    """
    first, end = int(column.offsets[0]), int(column.offsets[-1])
    if not first and end == len(column.values):
        return column
    return Ragged(column.values[first:end], column.offsets - first)


def ragged_to_arrow(column: Ragged[Any]) -> pa.Array:
    """Return a list column; values of shape (N, *shape) are fixed-size lists of shape `shape`."""
    column = compact(column)
    flat = np.ascontiguousarray(column.values)
    kind = pa.from_numpy_dtype(flat.dtype)
    values = pa.Array.from_buffers(kind, flat.size, [None, pa.py_buffer(flat)])
    for dimension in range(flat.ndim - 1, 0, -1):
        kind = pa.list_(pa.field("item", kind, nullable=False), flat.shape[dimension])
        num_lists = int(np.prod(flat.shape[:dimension], dtype=np.int64))
        values = pa.Array.from_buffers(kind, num_lists, [None], children=[values])
    return list_to_arrow(column.offsets, values, list_of(kind))


def column_of(batch: pa.RecordBatch, name: str) -> pa.Array:
    """Return the column of this name; none or several are a CorruptRecordError."""
    position = batch.schema.get_field_index(name)
    if position < 0:
        raise CorruptRecordError(f"a mini-batch has not exactly one column {name!r}")
    return batch.column(position)


def list_from_arrow(column: pa.Array) -> tuple[pa.Array, NDArray[np.int32]]:
    """Return the values of a list column's own rows, and their offsets from 0 on."""
    if not len(column):
        return column.values.slice(0, 0), np.zeros(1, np.int32)
    offsets = column.offsets.to_numpy()
    first, end = int(offsets[0]), int(offsets[-1])
    return column.values.slice(first, end - first), offsets - first if first else offsets


def numbers(values: pa.Array) -> NDArray[Any]:
    """Return a view of the numbers; a null is a CorruptRecordError."""
    if values.null_count:
        raise CorruptRecordError(f"{values.null_count} nulls among {values.type} values")
    return values.to_numpy()


def ragged_from_arrow(column: pa.Array) -> Ragged[Any]:
    """Return a list column as views; nulls, or another type, are a CorruptRecordError."""
    if not pa.types.is_list(column.type) or column.null_count:
        raise CorruptRecordError(f"{column.null_count} nulls in a column of type {column.type}")
    values, offsets = list_from_arrow(column)
    shape: list[int] = [len(values)]
    while pa.types.is_fixed_size_list(values.type):
        if values.null_count:
            raise CorruptRecordError(f"{values.null_count} nulls among {values.type} values")
        size = values.type.list_size
        shape.append(size)
        values = values.values.slice(values.offset * size, len(values) * size)
    return Ragged(numbers(values).reshape(shape), offsets)
