"""Mini-batches as Arrow: one record batch per (mini-batch, dp_rank), as one IPC stream.

Columns are ragged, without padding; the schema's metadata describes the mini-batch, one key per
field: text unchanged, everything else as compact JSON with sorted keys. The encoding is canonical:
metadata sorted, zeros under nulls, no dictionaries, no compression. Columns and metadata of a newer
release are ignored, and are part of the hash. Batches of an older release have no `aggregation`.

The columns of an operation are present together or not at all. An extra column `name` travels as
`extra.name`, so that it has another name than every built-in column; its extent is in the metadata.
"""

# pyarrow has neither stubs nor annotations, so all its values are unknown to the checker.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, cast

import numpy as np
import pyarrow as pa

from turnstream.errors import BatchingError, CorruptRecordError
from turnstream.records.arrow import (
    column_of,
    content_hash,
    from_arrow,
    list_from_arrow,
    list_to_arrow,
    nullable_to_arrow,
    to_arrow,
)
from turnstream.records.checks import OPERATION_COLUMNS, ROW_COLUMNS, contradiction
from turnstream.records.encoding import check_format, field_names, read_value, reading, to_plain
from turnstream.types import (
    ExtraColumn,
    MiniBatch,
    MiniBatchInfo,
    OperationColumns,
    Ragged,
    Rows,
)

COLUMNS: Final = tuple(
    "version_runs" if name == "run_versions" else name
    for name in ROW_COLUMNS
    if name != "run_counts"
)
"""Every column of a mini-batch, except those of operations and declared ones.

`reward` is null where a trajectory has none, and the `version` of a run where its tokens were
observed. `logprobs`, `advantages` and `token_weights` are absent if no row has any. `rewards` are
absent if all are 0.0: they would be a quarter of all bytes."""

METADATA_FORMAT: Final = 0

_OPTIONAL: Final = ("logprobs", "rewards", "advantages", "token_weights", "ratio_mask")
_EXTRA_PREFIX: Final = "extra."
_EXTENTS: Final = b"extras"
_TEXTS: Final = ("run", "lineage", "manifest_hash", "aggregation")
_ABSENT_IF_NONE: Final = ("aggregation", "totals")
_SHA256_DIGITS: Final = 64


class EncodedMiniBatch(NamedTuple):
    """A mini-batch as bytes.

    Attributes:
        data: an Arrow IPC stream: schema, one record batch, end.
        content_hash: hex XXH3-128 over columns and metadata; independent of the IPC framing.
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


def with_sha256(encoded: EncodedMiniBatch) -> EncodedMiniBatch:
    """Return the mini-batch with the hash that workers of earlier releases check."""
    return encoded._replace(content_hash=content_hash(_read_stream(encoded.data), is_sha256=True))


def decode_mini_batch(
    data: bytes | bytearray | memoryview, *, expected_hash: str | None = None
) -> MiniBatch:
    """Return the mini-batch of an IPC stream; its token arrays are read-only views into `data`.

    Its content hash, XXH3-128 or SHA-256, is compared with `expected_hash`, unless that is None.
    """
    with reading(f"no mini-batch in {len(data)} bytes", pa.ArrowException, OSError):
        batch = _read_stream(data)
        is_sha256 = expected_hash is not None and len(expected_hash) == _SHA256_DIGITS
        if expected_hash is not None and content_hash(batch, is_sha256=is_sha256) != expected_hash:
            raise CorruptRecordError(f"the content of a mini-batch of {len(data)} bytes differs")
        info = _decode_info(batch.schema.metadata or {})
        mini_batch = MiniBatch(rows=_to_rows(batch), info=info)
    reason = contradiction(mini_batch)
    if reason:
        raise CorruptRecordError(reason)
    return mini_batch


def _to_arrow(mini_batch: MiniBatch) -> pa.RecordBatch:
    rows = mini_batch.rows
    arrays: dict[str, pa.Array] = {}
    for name in COLUMNS:
        if name == "version_runs":
            arrays[name] = _runs_to_arrow(rows)
        elif name == "reward":
            arrays[name] = nullable_to_arrow(rows.reward, is_valid=~np.isnan(rows.reward))
        elif getattr(rows, name) is not None and (name != "rewards" or rows.rewards.values.any()):
            arrays[name] = to_arrow(getattr(rows, name))
    if rows.operations is not None:
        found = {name: getattr(rows.operations, name) for name in OPERATION_COLUMNS}
        arrays |= {name: to_arrow(values) for name, values in found.items() if values is not None}
    for name in sorted(rows.extras):
        arrays[_EXTRA_PREFIX + name] = to_arrow(rows.extras[name].values)
    fields = [pa.field(n, array.type, nullable=n == "reward") for n, array in arrays.items()]
    metadata = _encode_info(mini_batch.info)
    if rows.extras:
        extents = {name: column.per for name, column in rows.extras.items()}
        metadata[_EXTENTS] = _json(extents)
    schema = pa.schema(fields, metadata=dict(sorted(metadata.items())))
    return pa.RecordBatch.from_arrays(list(arrays.values()), schema=schema)


def _runs_to_arrow(rows: Rows) -> pa.Array:
    versions, counts = rows.run_versions.flat(), rows.run_counts.flat()
    runs = pa.StructArray.from_arrays(
        [
            nullable_to_arrow(versions.values, is_valid=versions.values >= 0),
            to_arrow(counts.values),
        ],
        fields=[pa.field("version", pa.int64()), pa.field("count", pa.int32(), nullable=False)],
    )
    return list_to_arrow(counts.offsets, runs)


def _write_stream(sink: Any, batch: pa.RecordBatch) -> None:
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)


def _read_stream(data: bytes | bytearray | memoryview) -> pa.RecordBatch:
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        batch = reader.read_next_batch()
    batch.validate(full=True)
    return batch


def _to_rows(batch: pa.RecordBatch) -> Rows:
    names = set(batch.schema.names)
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        if name in _OPTIONAL and name not in names:
            columns[name] = None
            continue
        column = column_of(batch, name)
        if name == "version_runs":
            runs, offsets = list_from_arrow(column)
            columns["run_versions"] = Ragged(
                from_arrow(runs.field("version").fill_null(-1)), offsets
            )
            columns["run_counts"] = Ragged(from_arrow(runs.field("count")), offsets)
        elif name == "reward":
            columns[name] = column.to_numpy(zero_copy_only=False)
        else:
            columns[name] = from_arrow(column)
    if columns["rewards"] is None:
        mask = columns["loss_mask"]
        columns["rewards"] = Ragged(np.zeros(len(mask.values), np.float32), mask.offsets)
    operations = None
    if names.intersection(OPERATION_COLUMNS):
        operations = OperationColumns(
            **{
                name: from_arrow(column_of(batch, name))
                for name in OPERATION_COLUMNS
                if name in names or name not in _OPTIONAL
            }
        )
    return Rows(**columns, operations=operations, extras=_extras(batch))


def _extras(batch: pa.RecordBatch) -> dict[str, ExtraColumn]:
    """Return the declared columns in order of name."""
    extents: Any = json.loads((batch.schema.metadata or {}).get(_EXTENTS, b"{}"))
    if not isinstance(extents, dict):
        raise CorruptRecordError(f"extra columns are declared as {extents!r}")
    declared = sorted(cast("dict[str, Any]", extents).items())
    found = [name for name in batch.schema.names if name.startswith(_EXTRA_PREFIX)]
    if sorted(found) != [_EXTRA_PREFIX + name for name, _ in declared]:
        raise CorruptRecordError(f"columns {found} for the extra columns {sorted(extents)}")
    return {
        name: ExtraColumn(per=per, values=from_arrow(column_of(batch, _EXTRA_PREFIX + name)))
        for name, per in declared
    }


def _encode_info(info: MiniBatchInfo) -> dict[bytes, bytes]:
    values: dict[str, Any] = {"format": METADATA_FORMAT, **to_plain(info)}
    for name in _ABSENT_IF_NONE:
        if values[name] is None:
            del values[name]
    return {
        name.encode(): value.encode() if name in _TEXTS else _json(value)
        for name, value in values.items()
    }


def _decode_info(metadata: Mapping[bytes, bytes]) -> MiniBatchInfo:
    with reading("the metadata of a mini-batch"):
        check_format("mini-batch", json.loads(metadata[b"format"]), newest=METADATA_FORMAT)
        stored = {
            name: metadata[name.encode()]
            for name in field_names(MiniBatchInfo)
            if name not in _ABSENT_IF_NONE or name.encode() in metadata
        }
        values = {
            name: value.decode() if name in _TEXTS else json.loads(value)
            for name, value in stored.items()
        }
        return read_value(MiniBatchInfo, {**dict.fromkeys(_ABSENT_IF_NONE), **values})


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()
