"""Stored mini-batches, with columns per token, of operations, and declared extras."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from testkit import assert_same, extra_column, mini_batch_info, operation_rows, rows
from testkit.arrow import Edit, edited, read_arrow, with_column, with_metadata, without_column
from turnstream.errors import BatchingError, CorruptRecordError
from turnstream.records.batches import decode_mini_batch, encode_mini_batch, with_sha256
from turnstream.types import MiniBatch, Ragged, Rows

EXTRAS_FILE = Path(__file__).parent / "golden" / "mini_batch_extras.hex"


def mini_of(built: Rows) -> MiniBatch:
    return MiniBatch(rows=built, info=mini_batch_info(built, assembly_version=0))


def plain() -> MiniBatch:
    built = rows(
        "abCdE",
        "abF",
        "g|h",
        group_ids=["g0", "g0", ""],
        advantages=[0.5, -0.5, 0.0],
        is_padding=[False, False, True],
        token_reward=0.25,
        version=7,
    )
    info = mini_batch_info(
        built, step=3, pad_token_id=9, micro_batches=((0,), (1, 2)), assembly_version=0
    )
    return MiniBatch(rows=built, info=info)


def with_tokens() -> MiniBatch:
    """A mini-batch with an advantage and a weight per response token."""
    built = rows("abCdE", "f|G")
    advantages = Ragged.from_rows([[0.5, 0.0, -0.5], [1.5]], np.float32)
    token_weights = Ragged.from_rows([[1.0, 0.0, 0.25], [0.5]], np.float32)
    return mini_of(replace(built, advantages=advantages, token_weights=token_weights))


def with_operations(*, num_targets: int | None = None) -> MiniBatch:
    """Two rows of one operation, the second without weight, and an inert row."""
    inert = [False, False, True]
    return mini_of(operation_rows("ABC", "de", "f|g", num_targets=num_targets, is_padding=inert))


def with_extras() -> MiniBatch:
    """Router choices of all tokens but the last, patches of an image, and a score per row."""
    built = rows("abCdE", "f|G", "h|i", is_padding=[False, False, True])
    routes = np.arange(5 * 2 * 2, dtype=np.uint8).reshape(5, 2, 2)
    extras = {
        "patches": extra_column("items", np.ones((3, 4), np.float16), [0, 3, 3, 3]),
        "routes": extra_column("first_tokens", routes, [0, 4, 5, 5]),
        "score": extra_column("row", np.array([0.5, 1.5, 0], np.float64), [0, 1, 2, 3]),
        "teacher_logprobs": extra_column(
            "response_token", np.array([-0.5] * 4 + [0], np.float32), [0, 3, 4, 5]
        ),
    }
    return mini_of(replace(built, extras=extras))


SHA256 = {
    "plain": "027b0f3ca45384ba9570cbc21b8ba60d4a038c76e37b3aa215d901a8f87dee0a",
    "tokens": "c3fabd11d84be516c8287891d2236f47b2f35c4629226066641f1af997f6bb6a",
    "operations": "ba2bc90edc8324fa29763cab48d9b43c13a64992b8433ab6eefbba74bfbff95f",
    "operations_of_several": "b6e2923fbdfc5ffe777f1469534f4528220143e774bb5ceb4982b5b695d0658d",
    "extras": "bc5f736f87f34d692f18358c0acc98a44a49d9aac253b6f759492ba365fa66fc",
}
XXH3 = {
    "plain": "5feb7b575a8c81806cac387ab3cf820f",
    "tokens": "98e0b80a0ec85fc416a6c71f0804a1a5",
    "operations": "e1c5a8b481a85a474f1cdd5559db25b6",
    "operations_of_several": "8a1de2759e6ef612420c281a3ea00164",
    "extras": "d1f2ab63223720dfbde5bce1cb01978d",
}
GOLDEN_BATCHES = {
    "plain": plain(),
    "tokens": with_tokens(),
    "operations": with_operations(),
    "operations_of_several": with_operations(num_targets=2),
    "extras": with_extras(),
}


def test_extra_columns_are_sorted_and_declared_in_the_metadata():
    mini = with_extras()
    shuffled = replace(mini.rows, extras=dict(reversed(list(mini.rows.extras.items()))))

    metadata = read_arrow(encode_mini_batch(mini).data).schema.metadata

    assert list(metadata) == sorted(metadata)
    assert metadata[b"extras"] == (
        b'{"patches":"items","routes":"first_tokens","score":"row",'
        b'"teacher_logprobs":"response_token"}'
    )
    assert encode_mini_batch(mini_of(shuffled)).data == encode_mini_batch(mini).data


@pytest.mark.parametrize("name", ["tokens", "operations_of_several", "extras"])
def test_values_of_any_shape_are_decoded_without_a_copy(name: str):
    encoded = encode_mini_batch(GOLDEN_BATCHES[name])

    decoded = decode_mini_batch(encoded.data).rows

    columns = [decoded.input_ids, decoded.loss_mask, decoded.logprobs]
    columns += [decoded.advantages, decoded.token_weights]
    columns += [column.values for column in decoded.extras.values()]
    if decoded.operations:
        columns += [decoded.operations.target_ids, decoded.operations.target_weights]
    for column in columns:
        if column is not None:
            assert np.shares_memory(column.values, np.frombuffer(encoded.data, np.uint8))
            assert np.shares_memory(column.offsets, np.frombuffer(encoded.data, np.uint8))
            assert not column.values.flags.writeable


@pytest.mark.parametrize("name", GOLDEN_BATCHES)
def test_stored_mini_batch_of_format_0_is_read(name: str):
    # The content hash covers all columns and metadata. One file covers the framing as well.
    encoded = encode_mini_batch(GOLDEN_BATCHES[name])
    stored = bytes.fromhex(EXTRAS_FILE.read_text()) if name == "extras" else encoded.data

    for found, expected in ((encoded, XXH3[name]), (with_sha256(encoded), SHA256[name])):
        decoded = decode_mini_batch(stored, expected_hash=expected)

        assert found.content_hash == expected
        assert_same(decoded, GOLDEN_BATCHES[name])


ONE_PER_TOKEN = [[1, 1, 1], [1, 1], [1, 1]]
INT32 = pa.int32()


@pytest.mark.parametrize(
    ("reason", "mini", "edit"),
    [
        ("'target_ids'", with_operations(), without_column("target_ids")),
        ("'request_id'", with_operations(), without_column("request_id")),
        (
            "1 nulls among string",
            with_operations(),
            with_column("request_id", pa.array(["a", "a", None])),
        ),
        (
            "target_ids is int64, not lists of int64",
            with_operations(),
            with_column("target_ids", pa.array([1, 2, 3])),
        ),
        (
            "1 nulls among fixed_size_list",
            with_extras(),
            with_column(
                "extra.patches", pa.array([[[1], None], [], []], pa.list_(pa.list_(INT32, 1)))
            ),
        ),
        (
            "1 nulls among int32",
            with_extras(),
            with_column(
                "extra.patches", pa.array([[[None]], [], []], pa.list_(pa.list_(INT32, 1)))
            ),
        ),
        (
            "lists of string",
            with_extras(),
            with_column("extra.patches", pa.array([["a"], [], []], pa.list_(pa.string()))),
        ),
        ("for the extra columns", with_extras(), without_column("extra.score")),
        ("for the extra columns", with_extras(), with_metadata(extras={"routes": "items"})),
        ("declared as 3", with_extras(), with_metadata(extras=3)),
        (
            "one value per 7",
            with_extras(),
            with_metadata(
                extras={"patches": 7, "routes": [], "score": {}, "teacher_logprobs": None}
            ),
        ),
    ],
)
def test_mini_batch_whose_columns_do_not_fit_is_refused(reason: str, mini: MiniBatch, edit: Edit):
    data = edited(mini, edit)

    with pytest.raises(CorruptRecordError, match=reason):
        decode_mini_batch(data)


THREE = rows("abCdE", "f|G", "h|i", is_padding=[False, False, True])
OPERATION = operation_rows("ABC", "de", "f|g", is_padding=[False, False, True])
ROUTES = np.ones((3, 1, 2), np.uint8)


def operation(**changes: Any) -> MiniBatch:
    """Return a mini-batch of an operation with changed columns."""
    assert OPERATION.operations
    return mini_of(replace(OPERATION, operations=replace(OPERATION.operations, **changes)))


def of_operation(*texts: str, trajectory_id: Sequence[str] = ("", "", "")) -> MiniBatch:
    """Return rows of other prompts and trajectories with the columns of an operation."""
    built = rows(*texts, is_padding=[False, False, True])
    return mini_of(replace(built, trajectory_id=trajectory_id, operations=OPERATION.operations))


def extra(per: Any, values: np.ndarray, offsets: list[int], *, name: str = "x") -> MiniBatch:
    """Return a mini-batch of three rows with this extra column."""
    return mini_of(replace(THREE, extras={name: extra_column(per, values, offsets)}))


@pytest.mark.parametrize(
    ("reason", "wrong"),
    [
        ("request_id has 2 rows of 3", operation(request_id=["a", "b"])),
        ("row 1 has no request_id", operation(request_id=["a", "", ""])),
        ("datum_index is int64", operation(datum_index=np.zeros(3, np.int64))),
        ("datum_index has 1 rows", operation(datum_index=np.zeros(1, np.int32))),
        (
            "target_ids is lists of int32",
            operation(target_ids=Ragged.from_rows(ONE_PER_TOKEN, np.int32)),
        ),
        (
            "target_ids has not one value per token",
            operation(target_ids=Ragged.from_rows([[1, 1], [1], [1]], np.int64)),
        ),
        (
            r"have \(\) and \(2,\) values per token",
            operation(
                target_weights=Ragged.from_rows([np.ones((n, 2)) for n in (3, 2, 2)], np.float32)
            ),
        ),
        ("has a prompt of 1 tokens", of_operation("|ABC", "d|E", "f|g")),
        (
            "trajectory 'g0/1/0'",
            of_operation("|ABC", "|DE", "f|g", trajectory_id=("", "g0/1/0", "")),
        ),
        ("extra column '': is no name", extra("row", np.ones(3), [0, 1, 2, 3], name="")),
        ("extra column 'a b': is no name", extra("row", np.ones(3), [0, 1, 2, 3], name="a b")),
        ("per 'pixel', not per token or", extra("pixel", np.ones(3), [0, 1, 2, 3])),
        ("bool values", extra("row", np.ones(3, np.bool_), [0, 1, 2, 3])),
        (">i4 values", extra("row", np.ones(3, ">i4"), [0, 1, 2, 3])),
        (r"values of shape \(0,\)", extra("row", np.ones((3, 0)), [0, 1, 2, 3])),
        ("2 rows of 3", extra("row", np.ones(2), [0, 1, 2])),
        ("2 values, one per row, for row 1 ", extra("row", np.ones(4), [0, 1, 3, 4])),
        ("4 values, one per token, for row 0 ", extra("token", np.ones(4), [0, 4, 4, 4])),
        ("1 values, one per token, for row -3", extra("token", np.ones(8), [0, 5, 7, 8])),
        ("3 values, one per first_tokens", extra("first_tokens", ROUTES, [0, 0, 3, 3])),
        ("float32 values", extra("first_tokens", np.ones(3, np.float32), [0] * 4)),
        (r"values of shape \(2,\)", extra("first_tokens", ROUTES[:, 0], [0] * 4)),
        ("2 values, one per response_token", extra("response_token", np.ones(2), [0, 2, 2, 2])),
    ],
)
def test_column_that_does_not_fit_is_not_encoded(reason: str, wrong: MiniBatch):
    with pytest.raises(BatchingError, match=reason):
        encode_mini_batch(wrong)
