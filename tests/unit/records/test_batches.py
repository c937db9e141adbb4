"""Mini-batches as Arrow."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import assert_same, mini_batch, mini_batch_info, rows, spell
from testkit.arrow import Edit, edited, read_arrow, with_column, with_metadata, without_column
from testkit.strategies import mini_batches, operation_mini_batches
from turnstream.errors import BatchingError, CorruptRecordError, RecordError, UnknownFormatError
from turnstream.records.batches import decode_mini_batch, encode_mini_batch
from turnstream.records.checks import ROW_COLUMNS
from turnstream.types import MiniBatch, Ragged, Rows

UNSIGNED_RUNS = pa.list_(pa.struct([("version", pa.uint64()), ("count", pa.int32())]))


def with_rows(mini: MiniBatch, **changes: Any) -> MiniBatch:
    return replace(mini, rows=replace(mini.rows, **changes))


@given(mini=mini_batches() | operation_mini_batches())
def test_decoded_mini_batch_is_the_encoded_one(mini: MiniBatch):
    encoded = encode_mini_batch(mini)

    decoded = decode_mini_batch(encoded.data, expected_hash=encoded.content_hash)

    assert_same(decoded, mini)
    assert encode_mini_batch(decoded).data == encoded.data
    assert encoded.num_bytes == len(encoded.data)


def test_unknown_values_are_nulls_for_other_arrow_readers():
    built = rows("abCdE", "f|g", is_padding=[False, True], version=7)
    mini = MiniBatch(rows=built, info=mini_batch_info(built))

    seen = read_arrow(encode_mini_batch(mini).data).to_pylist()

    assert [row["reward"] for row in seen] == [1.0, None]
    assert seen[0]["version_runs"] == [
        {"version": 7, "count": 1},
        {"version": None, "count": 1},
        {"version": 7, "count": 1},
    ]


def test_metadata_is_canonical():
    mini = mini_batch(
        "abC", "d|eF", run="a run", micro_batches=((1,), (0,)), aggregation="prompt_mean"
    )

    metadata = read_arrow(encode_mini_batch(mini).data).schema.metadata
    older = read_arrow(encode_mini_batch(mini_batch("abC")).data).schema.metadata

    assert list(metadata) == sorted(metadata)
    assert metadata[b"run"] == b"a run"
    assert metadata[b"aggregation"] == b"prompt_mean"
    assert metadata[b"micro_batches"] == b"[[1],[0]]"
    assert metadata[b"denominators"] == (
        b'{"length_constant":0,"num_groups":1,"num_sequences":2,"num_tokens":2,'
        b'"num_trajectories":2,"weight_sum":2.0}'
    )
    assert metadata[b"width"] == b"3"
    assert b"aggregation" not in older  # a batch of an older release does not name it


def test_columns_without_values_are_left_out_and_come_back():
    built = rows("abC", "dE", logprobs=None)
    mini = MiniBatch(rows=built, info=mini_batch_info(built))

    encoded = encode_mini_batch(mini)

    assert {"logprobs", "rewards"}.isdisjoint(read_arrow(encoded.data).schema.names)
    assert_same(decode_mini_batch(encoded.data), mini)


def test_rows_inside_a_longer_buffer_are_encoded_alone():
    whole = rows("abC", "abCdE", "xY")
    second = replace(
        rows("abCdE", first_row_id=1),
        input_ids=Ragged(whole.input_ids.values, whole.input_ids.offsets[1:3]),
        loss_mask=Ragged(whole.loss_mask.values, whole.loss_mask.offsets[1:3]),
    )
    mini = MiniBatch(rows=second, info=mini_batch_info(second))

    encoded = encode_mini_batch(mini)

    alone = rows("abCdE", first_row_id=1)
    expected = encode_mini_batch(MiniBatch(rows=alone, info=mini_batch_info(alone)))
    assert encoded.data == expected.data
    assert spell(decode_mini_batch(encoded.data).rows) == ["abCdE"]


def test_unknown_columns_and_metadata_are_ignored():
    mini = mini_batch("abC", "deF")
    experts = pa.array([[[1, 2]], [[3, 4]]], pa.list_(pa.list_(pa.int16(), 2)))

    add_column, add_metadata = with_column("router_choices", experts), with_metadata(codec={})
    newer = edited(mini, lambda batch: add_metadata(add_column(batch)))

    assert_same(decode_mini_batch(newer), mini)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({b"format": b"1"}, r"mini-batch was .* newer .*format 1; .* 0"),
        ({b"aggregation": b"median"}, r"newer release .*, with the value 'median'"),
    ],
)
def test_mini_batch_of_a_newer_release_is_refused(metadata: dict[bytes, bytes], message: str):
    def change(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.replace_schema_metadata({**batch.schema.metadata, **metadata})

    with pytest.raises(UnknownFormatError, match=message):
        decode_mini_batch(edited(mini_batch(), change))


@given(data=st.data())
def test_flipped_byte_is_refused_or_harmless(data: st.DataObject):
    """Harmless: the padding of the IPC stream, which holds no content."""
    mini = mini_batch("abCdE", "a|bC")
    encoded = encode_mini_batch(mini)
    damaged = bytearray(encoded.data)
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))

    with contextlib.suppress(CorruptRecordError):
        assert_same(decode_mini_batch(damaged, expected_hash=encoded.content_hash), mini)
    with contextlib.suppress(RecordError):  # some values are as good as the true ones
        decode_mini_batch(damaged)


def test_offsets_that_leave_their_buffer_are_refused_before_anything_is_read():
    data = bytes(encode_mini_batch(mini_batch("abC", "deF")).data)
    text_bounds = np.array([0, 6, 12], np.int32).tobytes()
    beyond = np.array([0, 60_000, 12], np.int32).tobytes()
    assert text_bounds in data

    with pytest.raises(CorruptRecordError, match="ffset"):
        decode_mini_batch(data.replace(text_bounds, beyond))


def test_mini_batch_cut_short_is_refused():
    encoded = encode_mini_batch(mini_batch("abCdE"))

    for length in range(0, 4096, 97):
        with pytest.raises(CorruptRecordError):
            decode_mini_batch(encoded.data[:length])


@given(content=st.binary(max_size=300))
def test_any_bytes_are_refused_with_a_typed_error(content: bytes):
    with pytest.raises(CorruptRecordError):
        decode_mini_batch(content)


@pytest.mark.parametrize(
    ("reason", "edit"),
    [
        ("not exactly one column 'weight'", without_column("weight")),
        ("sample is int64, not int32", with_column("sample", pa.array([0, 1], pa.int64()))),
        (
            "loss_mask is lists of int8, not lists of uint8",
            with_column("loss_mask", pa.array([[1], [1]], pa.list_(pa.int8()))),
        ),
        ("1 nulls among float", with_column("weight", pa.array([1, None], pa.float32()))),
        (
            "1 nulls among uint8",
            with_column("loss_mask", pa.array([[1], [None]], pa.list_(pa.uint8()))),
        ),
        (
            "loss_mask has not one value",
            with_column("loss_mask", pa.array([[1], [1, 1]], pa.list_(pa.uint8()))),
        ),
        (
            "OverflowError",  # a flipped bit of the type made it one without a sign
            with_column(
                "version_runs", pa.array([[{"version": 0, "count": 1}]] * 2, UNSIGNED_RUNS)
            ),
        ),
        ("prompt_length", with_column("prompt_length", pa.array([1, 4], pa.int32()))),
        ("metadata of a mini-batch: KeyError", lambda batch: batch.replace_schema_metadata({})),
        ("metadata of a mini-batch: TypeError", with_metadata(step=1.5)),
        ("metadata of a mini-batch: TypeError", with_metadata(step=True)),
        ("metadata of a mini-batch: TypeError", with_metadata(denominators=[1])),
        ("metadata of a mini-batch: TypeError", with_metadata(micro_batches=3)),
        *[
            ("metadata of a mini-batch", with_metadata(figures=wrong))
            for wrong in [
                {},
                {"metrics": [], "tags": {}, "num_left_out": 0},
                {"metrics": {"m": {"num_trajectories": 1}}, "tags": {}, "num_left_out": 0},
                {
                    "metrics": {},
                    "tags": {"env": {"values": {"a": 3}, "other": None}},
                    "num_left_out": 0,
                },
                {"metrics": {}, "tags": {}, "num_left_out": 0.5},
                {"metrics": {}, "tags": {}, "num_left_out": True},
            ]
        ],
        ("1 row positions for 2 rows", with_metadata(micro_batches=[[0]])),
        ("2 row positions for 2 rows", with_metadata(micro_batches=[[0], [0]])),
        ("1 real and 1 inert rows are said", with_metadata(num_real_rows=1, num_inert_rows=1)),
        ("mini-batch 1 of 1", with_metadata(mini_batch=1)),
        ("dp_rank 2 of 2", with_metadata(dp_rank=2, dp_world_size=2)),
    ],
)
def test_mini_batch_that_contradicts_itself_is_refused(reason: str, edit: Edit):
    data = edited(mini_batch("abC", "deF"), edit)

    with pytest.raises(CorruptRecordError, match=reason):
        decode_mini_batch(data)


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("sample has 1 rows of 2", {"sample": np.zeros(1, np.int32)}),
        ("sample is int64, not int32", {"sample": np.zeros(2, np.int64)}),
        ("status has 3 rows of 2", {"status": ["", "", ""]}),
        ("rewards is lists of float64", {"rewards": Ragged.from_rows([[0], [0]], np.float64)}),
        ("rewards has not one value", {"rewards": Ragged.from_rows([[0], [0, 0]], np.float32)}),
        ("run_versions and run_counts", {"run_versions": Ragged.from_rows([[0, 0], []], np.int64)}),
        ("version_runs do not cover", {"run_counts": Ragged.from_rows([[2], [1]], np.int32)}),
    ],
)
def test_rows_that_contradict_themselves_are_not_encoded(reason: str, changes: dict[str, Any]):
    mini = with_rows(mini_batch("abC", "deF"), **changes)

    with pytest.raises(BatchingError, match=reason):
        encode_mini_batch(mini)
    with pytest.raises(BatchingError, match=r"width 3 .* a row has 4 tokens"):
        encode_mini_batch(mini_batch("abCD", "deF", width=3))


def test_every_column_of_rows_is_encoded():
    assert {*ROW_COLUMNS, "operations", "extras"} == set(Rows.__dataclass_fields__)
