from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from testkit import rows
from turnstream.batching.layouts.jagged import jagged
from turnstream.batching.layouts.packed import packed
from turnstream.batching.layouts.padded import left_padded, right_padded
from turnstream.batching.layouts.slots import require_aligned
from turnstream.errors import BatchingError
from turnstream.types import Ragged, Rows

LAYOUTS: dict[str, Callable[[Rows], Any]] = {
    "left_padded": lambda batch: left_padded(batch, width=9, response_width=9, pad_token_id=0),
    "right_padded": lambda batch: right_padded(batch, width=9, pad_token_id=0),
    "packed": lambda batch: packed(batch, bins=[range(len(batch))], pad_token_id=0),
    "jagged": jagged,
}


COLUMNS = ("loss_mask", "logprobs", "rewards", "advantages", "token_weights")


def dtype_of(column: str) -> type[np.generic]:
    return np.uint8 if column == "loss_mask" else np.float32


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("length", [1, 4])
def test_case_10_column_of_another_length_or_type_than_its_own_is_refused(
    column: str, length: int
) -> None:
    # The reference shifts a mask [1] of three tokens silently to [0, 0, 1].
    short = Ragged.from_rows([np.ones(1), np.ones(length)], dtype_of(column))

    with pytest.raises(BatchingError, match=f"{column} of row 1: {length} values for 3 response"):
        require_aligned(replace(rows("aB", "aBCD"), **{column: short}))
    # Layouts copy bits: two float64 advantages, read as float32, were the advantages 0 and 1.875.
    wrong = Ragged(np.ones(2, np.int64), np.array([0, 1, 2], np.int32))
    with pytest.raises(BatchingError, match=f"{column} is int64, not {dtype_of(column).__name__}"):
        require_aligned(replace(rows("aB", "aB"), **{column: wrong}))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_refuses_rows_that_disagree_with_themselves(layout: str) -> None:
    # Left padded, it was scored by the logits of a padding column, and jagged by another row's.
    with pytest.raises(BatchingError, match="row 5 trains its first token"):
        LAYOUTS[layout](rows("abC", "AB", first_row_id=4))

    LAYOUTS[layout](rows("abC", "|aB"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_length": np.array([1, 3], np.int32)}, "prompt_length of row 1: 3 of 2 tokens"),
        ({"advantage": np.array([1.0, 2.0])}, "advantage is float64, not float32"),
        (
            {"rewards": Ragged.from_rows([[0.0]], np.float32)},
            "rewards has 1 rows, the others have 2",
        ),
        ({"loss_mask": Ragged.from_rows([[1], [2]], np.uint8)}, "loss_mask: 2 is neither 0 nor 1"),
    ],
)
def test_case_10_columns_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchingError, match=message):
        require_aligned(replace(rows("aB", "aB"), **changes))


@pytest.mark.parametrize(
    ("values", "dtype", "message"),
    [
        ([0.25, 1], np.uint8, "row 1: 0.25 is no uint8"),
        ([1, 300], np.uint8, "row 1: 300 is no uint8"),
        (np.array([0.25, 1]), np.uint8, "row 1: 0.25 is no uint8"),
        (np.array([7, 2**31]), np.int32, "row 1: 2147483648 is no int32"),
        ([np.nan], np.int32, "row 1: nan is no int32"),
        *[(number, np.float32, "row 1 is a single value") for number in (0.5, np.array(0.5))],
    ],
)
def test_case_8_a_value_that_its_column_cannot_hold_is_refused(
    values: Any, dtype: Any, message: str
) -> None:
    # A fractional mask was cut to 0, and a large token id wrapped round, without a word.
    # The reference keeps the mask [.25, 1], in float32; of ours that is a weight of tokens.
    with pytest.raises(BatchingError, match=message):
        Ragged.from_rows([[1], values], dtype)


def test_case_8_whole_numbers_become_what_their_column_holds() -> None:
    of_rewards = Ragged.from_rows([[1, 2], np.array([3])], np.float32)
    of_ids = Ragged.from_rows([np.array([1.0, 2.0]), np.array([True])], np.int32)

    assert (of_rewards.values.tolist(), of_rewards.values.dtype) == ([1, 2, 3], np.float32)
    assert (of_ids.values.tolist(), of_ids.values.dtype) == ([1, 2, 1], np.int32)
