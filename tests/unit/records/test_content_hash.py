"""The content hash of a mini-batch: it depends on every value, and on nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given

from testkit import assert_same, mini_batch_info, rows
from testkit.arrow import read_arrow, with_column, write_arrow
from testkit.strategies import mini_batches
from turnstream.errors import CorruptRecordError
from turnstream.records.arrow import content_hash
from turnstream.records.batches import COLUMNS, decode_mini_batch, encode_mini_batch
from turnstream.types import MiniBatch

FRAMINGS: list[dict[str, Any]] = [
    {"compression": "lz4"},
    {"metadata_version": pa.ipc.MetadataVersion.V4},
]


def to_arrow(mini: MiniBatch) -> pa.RecordBatch:
    return read_arrow(encode_mini_batch(mini).data)


def three_rows() -> pa.RecordBatch:
    built = rows("abC", "deFG", "hI", token_reward=0.5)
    built = replace(built, advantages=built.rewards, token_weights=built.rewards)
    return to_arrow(MiniBatch(rows=built, info=mini_batch_info(built)))


def changed(value: Any) -> Any:
    """Return another value of the same kind; a list with another last item."""
    if isinstance(value, list):
        return [*value[:-1], changed(value[-1])]
    if isinstance(value, dict):
        return {**value, "version": None}
    if isinstance(value, bool):
        return not value
    return value + ("x" if isinstance(value, str) else 1)


@pytest.mark.parametrize("framing", FRAMINGS, ids=lambda framing: next(iter(framing)))
@given(mini=mini_batches())
def test_another_framing_of_the_same_columns_has_the_same_hash(
    framing: dict[str, Any], mini: MiniBatch
):
    encoded = encode_mini_batch(mini)

    reframed = write_arrow(read_arrow(encoded.data), **framing)

    assert reframed != encoded.data
    assert_same(decode_mini_batch(reframed, expected_hash=encoded.content_hash), mini)


def test_slices_and_the_order_of_columns_do_not_change_the_hash():
    batch = three_rows()
    reordered = batch.select(sorted(batch.schema.names))
    doubled = pa.concat_batches([batch, batch])

    same = [batch, reordered, doubled.slice(3), doubled.slice(0, 3)]
    pairs = pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2))
    both = pa.record_batch({"extra": pairs})
    last = pa.record_batch({"extra": pairs.take(pa.array([1]))})

    assert {*map(content_hash, same)} == {content_hash(batch)}
    assert content_hash(both.slice(1)) == content_hash(last) != content_hash(both.slice(0, 1))


def test_any_change_of_columns_metadata_or_order_changes_the_hash():
    batch = three_rows()
    metadata: dict[bytes, bytes] = batch.schema.metadata
    variants = [batch.take(pa.array(order)) for order in ([1, 0, 2], [2, 1, 0])]
    for name in COLUMNS:
        column = batch.column(name)
        values = column.to_pylist()
        values[1] = changed(values[1])
        variants.append(with_column(name, pa.array(values, column.type))(batch))
    changes = [{**metadata, key: value + b" "} for key, value in metadata.items()]
    variants += map(batch.replace_schema_metadata, [*changes, {**metadata, b"new": b""}])

    hashes = {content_hash(variant) for variant in (batch, *variants)}

    assert len(hashes) == 1 + len(variants)


@pytest.mark.parametrize(
    ("values", "others"),
    [
        (pa.array([[1, 2], [3]]), pa.array([[1], [2, 3]])),
        (pa.array(["ab", "c"]), pa.array(["a", "bc"])),
        (pa.array([0, 1]), pa.array([None, 1])),
        (pa.array([[0], []]), pa.array([[0], None])),
        (pa.array([1, 2], pa.int32()), pa.array([1, 2], pa.uint32())),
        (pa.array([1], pa.int32()), pa.array([1, 0], pa.int32())),
        (pa.array([[[1, 2]], [[3, 4]]]), pa.array([[[1], [2]], [[3, 4]]])),
        (pa.array([[1, 2]], pa.list_(pa.int64(), 2)), pa.array([[1, 2]])),
        (pa.array([{"a": 1}, {"a": 2}]), pa.array([{"b": 1}, {"b": 2}])),
        (pa.array([{"a": 1}, {"a": 2}]), pa.array([{"a": 2}, {"a": 1}])),
        (pa.array([True, False]), pa.array([True, None])),
        (pa.array([1, 2], pa.float16()), pa.array([2, 1], pa.float16())),
    ],
    ids=str,
)
def test_hash_of_an_unknown_column_depends_on_types_bounds_and_nulls(
    values: pa.Array, others: pa.Array
):
    batches = [pa.record_batch({"extra": column}) for column in (values, others)]

    assert len({*map(content_hash, batches)}) == 2


def test_dictionary_column_has_no_hash():
    batch = pa.record_batch({"extra": pa.array(["a", "a"]).dictionary_encode()})

    with pytest.raises(CorruptRecordError, match="no content hash of a column of type dictionary"):
        content_hash(batch)
