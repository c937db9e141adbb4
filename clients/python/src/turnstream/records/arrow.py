"""Columns as Arrow arrays and back, without a copy of numbers, and the hash of a record batch.

Values of more than one dimension are nested fixed-size lists: their type has the shape. The items
of a list are never null.
"""

# pyarrow has neither stubs nor annotations, so all its values are unknown to the checker.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from turnstream.errors import CorruptRecordError
from turnstream.types import Ragged

Column = Sequence[str] | NDArray[Any] | Ragged[Any]


def to_arrow(column: Column) -> pa.Array:
    """Return a column of texts, numbers or lists as Arrow; numbers are a view."""
    if isinstance(column, Ragged):
        own = column.flat()
        return list_to_arrow(own.offsets, _values_to_arrow(own.values))
    if isinstance(column, np.ndarray):
        return _values_to_arrow(column)
    return pa.array(column, pa.string())


def _values_to_arrow(values: NDArray[Any]) -> pa.Array:
    """Return values of shape (N, *shape) as fixed-size lists of shape `shape`."""
    values = np.ascontiguousarray(values)
    kind = pa.from_numpy_dtype(values.dtype)
    stored = np.packbits(values, bitorder="little") if values.dtype == np.bool_ else values
    array = pa.Array.from_buffers(kind, values.size, [None, pa.py_buffer(stored)])
    for dimension in range(values.ndim - 1, 0, -1):
        kind = pa.list_(pa.field("item", kind, nullable=False), values.shape[dimension])
        num_lists = int(np.prod(values.shape[:dimension], dtype=np.int64))
        array = pa.Array.from_buffers(kind, num_lists, [None], children=[array])
    return array


def nullable_to_arrow(values: NDArray[Any], *, is_valid: NDArray[np.bool_]) -> pa.Array:
    """Return the numbers with nulls where they are not valid, and zeros under the nulls."""
    if is_valid.all():
        return to_arrow(values)
    validity = pa.py_buffer(np.packbits(is_valid, bitorder="little"))
    filled = pa.py_buffer(np.where(is_valid, values, values.dtype.type(0)))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [validity, filled])


def list_to_arrow(offsets: NDArray[np.int32], values: pa.Array) -> pa.Array:
    """Return lists: row b is `values[offsets[b]:offsets[b + 1]]`."""
    kind = pa.list_(pa.field("item", values.type, nullable=False))
    buffer = pa.py_buffer(np.ascontiguousarray(offsets))
    return pa.Array.from_buffers(kind, len(offsets) - 1, [None, buffer], children=[values])


def column_of(batch: pa.RecordBatch, name: str) -> pa.Array:
    """Return the column of this name; none or several are a CorruptRecordError."""
    position = batch.schema.get_field_index(name)
    if position < 0:
        raise CorruptRecordError(f"a mini-batch has not exactly one column {name!r}")
    return batch.column(position)


def from_arrow(array: pa.Array) -> Any:
    """Return a column of texts, numbers or lists, numbers as views; nulls are refused."""
    if array.null_count:
        raise CorruptRecordError(f"{array.null_count} nulls among {array.type} values")
    if pa.types.is_string(array.type):
        return array.to_pylist()
    if not pa.types.is_list(array.type):
        return array.to_numpy(zero_copy_only=not pa.types.is_boolean(array.type))
    values, offsets = list_from_arrow(array)
    shape: list[int] = [len(values)]
    while pa.types.is_fixed_size_list(values.type):
        if values.null_count:
            raise CorruptRecordError(f"{values.null_count} nulls among {values.type} values")
        size = values.type.list_size
        shape.append(size)
        values = values.values.slice(values.offset * size, len(values) * size)
    if not pa.types.is_primitive(values.type):
        raise CorruptRecordError(f"lists of {values.type}")
    return Ragged(from_arrow(values).reshape(shape), offsets)


def list_from_arrow(column: pa.Array) -> tuple[pa.Array, NDArray[np.int32]]:
    """Return the values of a list column's own rows, and their offsets from 0 on."""
    if not len(column):
        return column.values.slice(0, 0), np.zeros(1, np.int32)
    offsets = column.offsets.to_numpy()
    first, end = int(offsets[0]), int(offsets[-1])
    return column.values.slice(first, end - first), offsets - first if first else offsets


def content_hash(batch: pa.RecordBatch, *, is_sha256: bool = False) -> str:
    """Return the hex XXH3-128 over names, types and values of all columns, and the metadata.

    With `is_sha256`, it is SHA-256. It does not depend on the IPC framing, on slices and on the
    order of columns. Columns of another type than numbers, text, lists and structs are a
    CorruptRecordError.
    """
    digest = hashlib.sha256() if is_sha256 else xxhash.xxh3_128()
    for piece in _content(batch):
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.hexdigest()


def _content(batch: pa.RecordBatch) -> Iterator[bytes | memoryview]:
    for key, value in sorted((batch.schema.metadata or {}).items()):
        yield b"metadata"
        yield key
        yield value
    for name in sorted(batch.schema.names):
        yield b"column"
        yield name.encode()
        yield from _array_content(column_of(batch, name))


def _array_content(array: pa.Array) -> Iterator[bytes | memoryview]:
    kind = array.type
    yield _bytes_of(array.is_valid().to_numpy(zero_copy_only=False)) if array.null_count else b""
    if pa.types.is_list(kind):
        values, offsets = list_from_arrow(array)
        yield b"list"
        yield _bytes_of(offsets)
        yield from _array_content(values)
    elif pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        yield b"lists of %d" % size
        yield from _array_content(array.values.slice(array.offset * size, len(array) * size))
    elif pa.types.is_struct(kind):
        yield b"struct of %d" % kind.num_fields
        for position, field in enumerate(kind):
            yield field.name.encode()
            yield from _array_content(array.field(position))
    elif pa.types.is_string(kind):
        _, bounds, text = array.buffers()
        offsets = np.frombuffer(bounds or bytes(4), np.int32)[array.offset :][: len(array) + 1]
        yield b"text"
        yield _bytes_of(offsets - offsets[0])
        yield memoryview(text or b"")[offsets[0] : offsets[-1]]
    elif pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        zero = False if pa.types.is_boolean(kind) else 0
        filled = array.fill_null(zero) if array.null_count else array
        values = filled.to_numpy(zero_copy_only=False)
        yield values.dtype.name.encode()
        yield _bytes_of(values)
    else:
        raise CorruptRecordError(f"no content hash of a column of type {kind}")


def _bytes_of(values: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(values).data.cast("B")
