"""Mini-batches as Arrow: one record batch per (mini-batch, dp_rank), as one IPC stream.

Columns are ragged, without padding; the schema's metadata describes the mini-batch. The encoding is
canonical: metadata sorted, zeros under nulls, no dictionaries, no compression. Columns and metadata
of a newer release are ignored, and are part of the hash.
"""

# pyarrow has neither stubs nor annotations, so all its values are unknown to the checker.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUnknownLambdaType=false

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from turnstream.errors import BatchingError, CorruptRecordError, RecordError
from turnstream.records.arrow import (
    column_of,
    compact,
    content_hash,
    list_from_arrow,
    list_of,
    list_to_arrow,
    nullable_to_arrow,
    numbers,
    numbers_to_arrow,
)
from turnstream.records.checks import contradiction
from turnstream.records.declared import (
    encode_declarations,
    extras_from_arrow,
    extras_to_arrow,
    operations_from_arrow,
    operations_to_arrow,
)
from turnstream.records.metadata import decode_info, encode_info
from turnstream.types import MiniBatch, Ragged, Rows

_RUN: Final = pa.struct(
    [pa.field("version", pa.int64()), pa.field("count", pa.int32(), nullable=False)]
)


COLUMNS: Final[dict[str, pa.DataType]] = {
    "row_id": pa.int64(),
    "trajectory_id": pa.string(),
    "group_id": pa.string(),
    "prompt_uid": pa.string(),
    "sample": pa.int32(),
    "attempt": pa.int32(),
    "sequence_index": pa.int32(),
    "is_last": pa.bool_(),
    "is_padding": pa.bool_(),
    "status": pa.string(),
    "weight": pa.float32(),
    "reward": pa.float32(),
    "prompt_length": pa.int32(),
    "trajectory_num_tokens": pa.int64(),
    "group_num_tokens": pa.int64(),
    "input_ids": list_of(pa.int32()),
    "loss_mask": list_of(pa.uint8()),
    "logprobs": list_of(pa.float32()),
    "rewards": list_of(pa.float32()),
    "version_runs": list_of(_RUN),
    "advantage": pa.float32(),
    "advantages": list_of(pa.float32()),
    "token_weights": list_of(pa.float32()),
}
"""Every column of a mini-batch, in order; `declared` has those of some mini-batches.

`reward` is null where a trajectory has none, and the `version` of a run where its tokens were
observed. `logprobs`, `advantages` and `token_weights` are absent if no row has any. `rewards` are
absent if all are 0.0: they would be a quarter of all bytes."""

_OPTIONAL: Final = ("logprobs", "rewards", "advantages", "token_weights")


class EncodedMiniBatch(NamedTuple):
    """A mini-batch as bytes.

    Attributes:
        data: an Arrow IPC stream: schema, one record batch, end.
        content_hash: hex SHA-256 over columns and metadata; independent of the IPC framing.
        num_bytes: length of `data`.
    """

    data: memoryview
    content_hash: str
    num_bytes: int


def encode_mini_batch(mini_batch: MiniBatch) -> EncodedMiniBatch:
    """Return a mini-batch as bytes, with a single copy of the columns."""
    reason = contradiction(mini_batch)
    if reason:
        raise BatchingError(reason)
    batch = _to_arrow(mini_batch)
    measured = pa.MockOutputStream()
    _write_stream(measured, batch)
    data = pa.allocate_buffer(measured.size())
    _write_stream(pa.FixedSizeBufferWriter(data), batch)
    return EncodedMiniBatch(memoryview(data).toreadonly(), content_hash(batch), data.size)


def decode_mini_batch(
    data: bytes | bytearray | memoryview, *, expected_hash: str | None = None
) -> MiniBatch:
    """Return the mini-batch of an IPC stream; its token arrays are read-only views into `data`.

    Args:
        data: the stream of `encode_mini_batch`.
        expected_hash: the content hash; None skips this check.
    """
    try:
        batch = _read_stream(data)
        if expected_hash is not None and content_hash(batch) != expected_hash:
            raise CorruptRecordError(f"the content of a mini-batch of {len(data)} bytes differs")
        info = decode_info(batch.schema.metadata or {})
        mini_batch = MiniBatch(rows=_to_rows(batch), info=info)
    except RecordError:
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, StopIteration) as error:
        raise CorruptRecordError(f"no mini-batch in {len(data)} bytes: {error!r}") from error
    reason = contradiction(mini_batch)
    if reason:
        raise CorruptRecordError(reason)
    return mini_batch


def _to_arrow(mini_batch: MiniBatch) -> pa.RecordBatch:
    rows = mini_batch.rows
    arrays: dict[str, pa.Array] = {}
    for name, kind in COLUMNS.items():
        if name == "version_runs":
            arrays[name] = _runs_to_arrow(rows)
            continue
        column = getattr(rows, name)
        if column is None or (name == "rewards" and not column.values.any()):
            continue
        if isinstance(column, Ragged):
            column = compact(column)
            values = numbers_to_arrow(column.values, kind.value_type)
            arrays[name] = list_to_arrow(column.offsets, values, kind)
        elif pa.types.is_string(kind):
            arrays[name] = pa.array(column, kind)
        elif pa.types.is_boolean(kind):
            packed = pa.py_buffer(np.packbits(column, bitorder="little"))
            arrays[name] = pa.Array.from_buffers(kind, len(column), [None, packed])
        elif name == "reward":
            arrays[name] = nullable_to_arrow(column, kind, is_valid=~np.isnan(column))
        else:
            arrays[name] = numbers_to_arrow(column, kind)
    arrays |= operations_to_arrow(rows.operations) | extras_to_arrow(rows.extras)
    fields = [pa.field(n, array.type, nullable=n == "reward") for n, array in arrays.items()]
    metadata = encode_info(mini_batch.info) | encode_declarations(rows.extras)
    schema = pa.schema(fields, metadata=dict(sorted(metadata.items())))
    return pa.RecordBatch.from_arrays(list(arrays.values()), schema=schema)


def _runs_to_arrow(rows: Rows) -> pa.Array:
    versions, counts = compact(rows.run_versions), compact(rows.run_counts)
    children = [
        nullable_to_arrow(versions.values, pa.int64(), is_valid=versions.values >= 0),
        numbers_to_arrow(counts.values, pa.int32()),
    ]
    runs = pa.Array.from_buffers(_RUN, len(counts.values), [None], children=children)
    return list_to_arrow(counts.offsets, runs, COLUMNS["version_runs"])


def _write_stream(sink: Any, batch: pa.RecordBatch) -> None:
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)


def _read_stream(data: bytes | bytearray | memoryview) -> pa.RecordBatch:
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        batch = reader.read_next_batch()
    batch.validate(full=True)
    return batch


def _to_rows(batch: pa.RecordBatch) -> Rows:
    columns: dict[str, Any] = {}
    for name, kind in COLUMNS.items():
        if name in _OPTIONAL and name not in batch.schema.names:
            columns[name] = None
            continue
        column = _column(batch, name)
        if name == "version_runs":
            runs, offsets = list_from_arrow(column)
            columns["run_versions"] = Ragged(numbers(runs.field(0).fill_null(-1)), offsets)
            columns["run_counts"] = Ragged(numbers(runs.field(1)), offsets)
        elif pa.types.is_list(kind):
            values, offsets = list_from_arrow(column)
            columns[name] = Ragged(numbers(values), offsets)
        elif pa.types.is_string(kind):
            columns[name] = column.to_pylist()
        elif name == "reward" or pa.types.is_boolean(kind):
            columns[name] = column.to_numpy(zero_copy_only=False)
        else:
            columns[name] = numbers(column)
    if columns["rewards"] is None:
        mask = columns["loss_mask"]
        columns["rewards"] = Ragged(np.zeros(len(mask.values), np.float32), mask.offsets)
    return Rows(**columns, operations=operations_from_arrow(batch), extras=extras_from_arrow(batch))


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    column = column_of(batch, name)
    if not _is_same_type(column.type, COLUMNS[name]):
        raise CorruptRecordError(f"column {name!r} is {column.type}, not {COLUMNS[name]}")
    if column.null_count and name != "reward":
        raise CorruptRecordError(f"column {name!r} has {column.null_count} nulls")
    return column


def _is_same_type(actual: pa.DataType, expected: pa.DataType) -> bool:
    """Return whether values are stored alike, without names and nullability of list items."""
    if pa.types.is_list(expected):
        return pa.types.is_list(actual) and _is_same_type(actual.value_type, expected.value_type)
    if pa.types.is_struct(expected):
        return pa.types.is_struct(actual) and [(f.name, f.type) for f in actual] == [
            (f.name, f.type) for f in expected
        ]
    return actual == expected
