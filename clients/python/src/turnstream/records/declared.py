"""The columns of some mini-batches: those of Tinker-style operations, and declared extra columns.

The operation columns are present together or not at all. An extra column `name` travels as
`extra.name`, so that it has another name than every built-in column. The unit that has one value is
in the schema's metadata, and so part of the content hash.
"""

# pyarrow has neither stubs nor annotations, so all its values are unknown to the checker.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, cast

import pyarrow as pa

from turnstream.errors import CorruptRecordError
from turnstream.records.arrow import (
    column_of,
    numbers_to_arrow,
    ragged_from_arrow,
    ragged_to_arrow,
)
from turnstream.types import Extent, ExtraColumn, OperationColumns

OPERATION_COLUMNS: Final = ("request_id", "datum_index", "target_ids", "target_weights")
"""In order: text, int32, and lists of int64 and float32, or of fixed-size lists of K of them."""

EXTRA_PREFIX: Final = "extra."
_DECLARATIONS: Final = b"extras"


def operations_to_arrow(operations: OperationColumns | None) -> dict[str, pa.Array]:
    """Return the four columns in order; none without operations."""
    if operations is None:
        return {}
    return {
        "request_id": pa.array(operations.request_id, pa.string()),
        "datum_index": numbers_to_arrow(operations.datum_index, pa.int32()),
        "target_ids": ragged_to_arrow(operations.target_ids),
        "target_weights": ragged_to_arrow(operations.target_weights),
    }


def operations_from_arrow(batch: pa.RecordBatch) -> OperationColumns | None:
    """Return the operation columns; some of them, or other types, are a CorruptRecordError."""
    if not any(name in batch.schema.names for name in OPERATION_COLUMNS):
        return None
    request_id = _column(batch, "request_id", kind=pa.string())
    return OperationColumns(
        request_id=request_id.to_pylist(),
        datum_index=_column(batch, "datum_index", kind=pa.int32()).to_numpy(),
        target_ids=ragged_from_arrow(_column(batch, "target_ids")),
        target_weights=ragged_from_arrow(_column(batch, "target_weights")),
    )


def extras_to_arrow(extras: Mapping[str, ExtraColumn]) -> dict[str, pa.Array]:
    """Return the columns in order of name."""
    return {EXTRA_PREFIX + name: ragged_to_arrow(extras[name].values) for name in sorted(extras)}


def encode_declarations(extras: Mapping[str, ExtraColumn]) -> dict[bytes, bytes]:
    """Return metadata with the extents; empty without extra columns."""
    if not extras:
        return {}
    extents = {name: column.per for name, column in extras.items()}
    return {_DECLARATIONS: json.dumps(extents, separators=(",", ":"), sort_keys=True).encode()}


def extras_from_arrow(batch: pa.RecordBatch) -> dict[str, ExtraColumn]:
    """Return the declared columns in order of name; other columns are a CorruptRecordError."""
    extents = _decode_declarations(batch.schema.metadata or {})
    found = [name for name in batch.schema.names if name.startswith(EXTRA_PREFIX)]
    if sorted(found) != [EXTRA_PREFIX + name for name in sorted(extents)]:
        raise CorruptRecordError(f"columns {found} for the extra columns {sorted(extents)}")
    return {
        name: ExtraColumn(
            per=extents[name],
            values=ragged_from_arrow(_column(batch, EXTRA_PREFIX + name)),
        )
        for name in sorted(extents)
    }


def _decode_declarations(metadata: Mapping[bytes, bytes]) -> dict[str, Extent]:
    declared: Any = json.loads(metadata.get(_DECLARATIONS, b"{}"))
    if not isinstance(declared, dict):
        raise CorruptRecordError(f"extra columns are declared as {declared!r}")
    return cast("dict[str, Extent]", declared)  # the values are compared with all extents later


def _column(batch: pa.RecordBatch, name: str, *, kind: pa.DataType | None = None) -> pa.Array:
    column = column_of(batch, name)
    if column.null_count or (kind is not None and column.type != kind):
        raise CorruptRecordError(
            f"column {name!r} is {column.type} with {column.null_count} nulls, not {kind}"
        )
    return column
