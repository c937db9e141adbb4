"""One more column of response tokens, such as a teacher's log-probabilities, in every layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from testkit import rows
from testkit.strategies import scored_rows
from turnstream.batching.layouts.padded import left_padded, left_padded_column
from turnstream.errors import BatchingError, RowTooLongError
from turnstream.types import Ragged, Rows

BATCH = rows("abC", "a|bCD")
VALUES = Ragged.from_rows([[1], [2, 3, 4]], np.int64)


def test_another_number_of_values_than_response_tokens_is_refused() -> None:
    short = Ragged.from_rows([[1], [2]], np.int64)

    with pytest.raises(BatchingError, match="the column of row 1: 1 values for 3 response tokens"):
        left_padded_column(short, BATCH, response_width=3)


def test_a_response_longer_than_the_columns_is_refused() -> None:
    with pytest.raises(RowTooLongError) as caught:
        left_padded_column(VALUES, BATCH, response_width=2)

    assert caught.value.args == (1, 3, 2)


@given(scored_rows())
def test_it_stands_where_the_rewards_do(batch: Rows) -> None:
    width = int(batch.input_ids.lengths.max(initial=0))
    response_width = int(batch.loss_mask.lengths.max(initial=0))

    padded = left_padded(batch, width=width, response_width=response_width, pad_token_id=0)
    beside = left_padded_column(batch.rewards, batch, response_width=response_width)
    np.testing.assert_array_equal(beside, padded.rewards_BR)
