"""The content hash of a mini-batch: every value counts, and nothing else does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given

from testkit import mini_batch, mini_batch_info, rows
from testkit.strategies import mini_batches
from turnstream.errors import CorruptRecordError
from turnstream.records.batches import COLUMNS, content_hash, encode_mini_batch
from turnstream.types import MiniBatch


def to_arrow(mini: MiniBatch) -> pa.RecordBatch:
    with pa.ipc.open_stream(encode_mini_batch(mini).data) as reader:
        return reader.read_next_batch()


def reframed(batch: pa.RecordBatch) -> pa.RecordBatch:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    with pa.ipc.open_stream(sink.getvalue()) as reader:
        return reader.read_next_batch()


def with_column(batch: pa.RecordBatch, name: str, values: pa.Array) -> pa.RecordBatch:
    position = batch.schema.get_field_index(name)
    if position < 0:
        return batch.append_column(name, values)
    return batch.set_column(position, name, values)


def changed(value: Any) -> Any:
    """Return another value of the same kind; a list with another last item."""
    if isinstance(value, list):
        return [*value[:-1], changed(value[-1])]
    if isinstance(value, dict):
        return {**value, "version": None}
    if isinstance(value, bool):
        return not value
    return value + ("x" if isinstance(value, str) else 1)


@given(mini=mini_batches())
def test_content_hash_survives_encoding(mini: MiniBatch):
    assert content_hash(to_arrow(mini)) == encode_mini_batch(mini).content_hash


def test_content_hash_is_independent_of_framing_slices_and_order():
    inert, batch = rows("x|y", is_padding=[True]), to_arrow(mini_batch("abC", "deF", "gH"))
    other = to_arrow(MiniBatch(rows=inert, info=mini_batch_info(inert)))
    both = pa.concat_batches([other.replace_schema_metadata(batch.schema.metadata), batch])

    same = [reframed(batch), batch.select(sorted(batch.schema.names)), both.slice(1)]

    assert {content_hash(variant) for variant in same} == {content_hash(batch)}


@pytest.mark.parametrize("name", COLUMNS)
def test_content_hash_depends_on_every_column(name: str):
    built = rows("abC", "deFG", "hI", token_reward=0.5)
    built = replace(built, advantages=built.rewards, token_weights=built.rewards)
    batch = to_arrow(MiniBatch(rows=built, info=mini_batch_info(built)))
    column = batch.column(name)
    values = column.to_pylist()
    values[1] = changed(values[1])

    edited = with_column(batch, name, pa.array(values, column.type))

    assert content_hash(edited) != content_hash(batch)


def test_content_hash_depends_on_every_metadata_value():
    batch = to_arrow(mini_batch())
    metadata: dict[bytes, bytes] = batch.schema.metadata

    variants = [{**metadata, key: value + b" "} for key, value in metadata.items()]
    hashes = {content_hash(batch.replace_schema_metadata(variant)) for variant in variants}

    assert len(hashes) == len(metadata)
    assert content_hash(batch) not in hashes


@pytest.mark.parametrize(
    ("values", "others"),
    [
        (pa.array([[1, 2], [3]]), pa.array([[1], [2, 3]])),
        (pa.array(["ab", "c"]), pa.array(["a", "bc"])),
        (pa.array([0, 1]), pa.array([None, 1])),
        (pa.array([1, 2], pa.int32()), pa.array([1, 2], pa.uint32())),
        (pa.array([1], pa.int32()), pa.array([1, 0], pa.int32())),
        (pa.array([[[1, 2]], [[3, 4]]]), pa.array([[[1], [2]], [[3, 4]]])),
    ],
    ids=["row bounds", "text bounds", "nulls", "type", "length", "inner bounds"],
)
def test_content_hash_distinguishes_values_of_equal_bytes(values: pa.Array, others: pa.Array):
    batches = [pa.record_batch({"extra": column}) for column in (values, others)]

    assert len({content_hash(batch) for batch in batches}) == 2


@pytest.mark.parametrize(
    "values",
    [
        pa.array([[[1, 2]], [[3, 4]]], pa.list_(pa.list_(pa.int16(), 2))),
        pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float16(), 2)),
        pa.array([True, None], pa.bool_()),
        pa.array([b"ab", b"c"], pa.binary()),
        pa.array([{"a": 1, "b": "x"}, {"a": None, "b": "y"}]),
        pa.array([1, None], pa.int64()),
    ],
    ids=lambda values: str(values.type),
)
def test_content_hash_depends_on_extra_columns_of_any_type(values: pa.Array):
    batch = to_arrow(mini_batch("abC", "deF"))
    swapped = pa.concat_arrays([values.slice(1), values.slice(0, 1)])

    columns = [values, swapped, pa.concat_arrays([swapped, values]).slice(2)]
    there, other, behind_other = (content_hash(with_column(batch, "x", c)) for c in columns)

    assert there == behind_other
    assert len({content_hash(batch), there, other}) == 3


def test_dictionary_column_is_refused_as_not_canonical():
    batch = pa.record_batch({"extra": pa.array(["a", "a"]).dictionary_encode()})

    with pytest.raises(CorruptRecordError, match="no content hash of a column of type dictionary"):
        content_hash(batch)
