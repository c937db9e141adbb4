"""Refusals of operation columns and extra columns that do not fit their rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from testkit import extra_column, mini_batch_info, operation_rows, rows
from turnstream.errors import BatchingError
from turnstream.records.batches import encode_mini_batch
from turnstream.types import ExtraColumn, MiniBatch, Ragged, Rows

THREE = rows("abCdE", "f|G", "h|i", is_padding=[False, False, True])
UNKNOWN: Any = "pixel"
OPERATION = operation_rows("ABC", "de", "f|g", is_padding=[False, False, True])


def mini_of(built: Rows) -> MiniBatch:
    return MiniBatch(rows=built, info=mini_batch_info(built))


ONE_PER_TOKEN = [[1, 1, 1], [1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("request_id has 2 rows of 3", {"request_id": ["a", "b"]}),
        ("row 1 has no request_id", {"request_id": ["a", "", ""]}),
        ("datum_index is int64", {"datum_index": np.zeros(3, np.int64)}),
        ("datum_index has 1 rows", {"datum_index": np.zeros(1, np.int32)}),
        ("target_ids is lists of int32", {"target_ids": Ragged.from_rows(ONE_PER_TOKEN, np.int32)}),
        (
            "target_ids has not one value per token",
            {"target_ids": Ragged.from_rows([[1, 1], [1], [1]], np.int64)},
        ),
        (
            r"have \(\) and \(2,\) values per token",
            {
                "target_weights": Ragged.from_rows(
                    [np.ones((3, 2)), np.ones((2, 2)), np.ones((2, 2))], np.float32
                )
            },
        ),
    ],
)
def test_operations_that_do_not_fit_are_not_encoded(reason: str, changes: dict[str, Any]):
    assert OPERATION.operations
    wrong = replace(OPERATION.operations, **changes)

    with pytest.raises(BatchingError, match=reason):
        encode_mini_batch(mini_of(replace(OPERATION, operations=wrong)))


@pytest.mark.parametrize(
    ("reason", "texts", "trajectory_id"),
    [
        ("has a prompt of 1 tokens", ["|ABC", "d|E", "f|g"], ["", "", ""]),
        ("trajectory 'g0/1/0'", ["|ABC", "|DE", "f|g"], ["", "g0/1/0", ""]),
    ],
)
def test_row_of_an_operation_has_neither_prompt_nor_trajectory(
    reason: str, texts: list[str], trajectory_id: list[str]
):
    built = rows(*texts, is_padding=[False, False, True])
    wrong = replace(built, trajectory_id=trajectory_id, operations=OPERATION.operations)

    with pytest.raises(BatchingError, match=reason):
        encode_mini_batch(mini_of(wrong))


@pytest.mark.parametrize(
    ("reason", "name", "column"),
    [
        ("extra column '': is no name", "", extra_column("row", np.ones(3), [0, 1, 2, 3])),
        ("extra column 'a b': is no name", "a b", extra_column("row", np.ones(3), [0, 1, 2, 3])),
        (
            "one value per 'pixel', not per token or",
            "x",
            extra_column(UNKNOWN, np.ones(3), [0, 1, 2, 3]),
        ),
        ("bool values", "x", extra_column("row", np.ones(3, np.bool_), [0, 1, 2, 3])),
        (">i4 values", "x", extra_column("row", np.ones(3, ">i4"), [0, 1, 2, 3])),
        (r"values of shape \(0,\)", "x", extra_column("row", np.ones((3, 0)), [0, 1, 2, 3])),
        ("2 rows of 3", "x", extra_column("row", np.ones(2), [0, 1, 2])),
        ("2 values, one per row, for row 1 ", "x", extra_column("row", np.ones(4), [0, 1, 3, 4])),
        (
            "4 values, one per token, for row 0 ",
            "x",
            extra_column("token", np.ones(4), [0, 4, 4, 4]),
        ),
        (
            "3 values, one per first_tokens",
            "x",
            extra_column("first_tokens", np.ones((3, 1, 2), np.uint8), [0, 0, 3, 3]),
        ),
        ("float32 values", "x", extra_column("first_tokens", np.ones(3, np.float32), [0] * 4)),
        (
            r"values of shape \(2,\)",
            "x",
            extra_column("first_tokens", np.ones((3, 2), np.uint8), [0] * 4),
        ),
        (
            "2 values, one per response_token",
            "x",
            extra_column("response_token", np.ones(2), [0, 2, 2, 2]),
        ),
        (
            "1 values, one per token, for row -3",
            "x",
            extra_column("token", np.ones(8), [0, 5, 7, 8]),
        ),
    ],
)
def test_extra_column_that_does_not_fit_is_not_encoded(reason: str, name: str, column: ExtraColumn):
    built = replace(THREE, extras={name: column})

    with pytest.raises(BatchingError, match=reason):
        encode_mini_batch(mini_of(built))
