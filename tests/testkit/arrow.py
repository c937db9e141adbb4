"""Mini-batches as Arrow, edited as no release writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from turnstream.records.batches import encode_mini_batch
from turnstream.types import MiniBatch

Edit = Callable[[pa.RecordBatch], pa.RecordBatch]


def read_arrow(data: memoryview | bytes) -> pa.RecordBatch:
    with pa.ipc.open_stream(data) as reader:
        return reader.read_next_batch()


def edited(mini: MiniBatch, edit: Edit) -> bytes:
    return write_arrow(edit(read_arrow(encode_mini_batch(mini).data)))


def write_arrow(batch: pa.RecordBatch, **options: Any) -> bytes:
    """Return the IPC stream of a record batch, with options of `pa.ipc.IpcWriteOptions`."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as out:
        out.write_batch(batch)
    return sink.getvalue().to_pybytes()


def with_metadata(**values: Any) -> Edit:
    texts = {name.encode(): json.dumps(value).encode() for name, value in values.items()}
    return lambda batch: batch.replace_schema_metadata({**batch.schema.metadata, **texts})


def with_column(name: str, values: pa.Array) -> Edit:
    def edit(batch: pa.RecordBatch) -> pa.RecordBatch:
        position = batch.schema.get_field_index(name)
        if position < 0:
            return batch.append_column(name, values)
        return batch.set_column(position, name, values)

    return edit


def without_column(name: str) -> Edit:
    return lambda batch: batch.drop_columns([name])
