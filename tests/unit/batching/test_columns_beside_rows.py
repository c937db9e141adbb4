"""One more column of response tokens, such as a teacher's log-probabilities, in every layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from testkit import rows
from testkit.strategies import scored_rows
from turnstream.batching.layout import left_padded, left_padded_column
from turnstream.batching.slots import response_column
from turnstream.errors import BatchingError, RowTooLongError
from turnstream.types import Ragged, Rows

BATCH = rows("abC", "a|bCD")
VALUES = Ragged.from_rows([[1], [2, 3, 4]], np.int64)


def test_it_is_right_aligned_like_the_response() -> None:
    placed = left_padded_column(VALUES, BATCH, response_width=4)

    assert (placed.tolist(), placed.dtype) == ([[0, 0, 0, 1], [0, 2, 3, 4]], np.int64)


def test_it_stands_in_the_slots_that_score_its_tokens() -> None:
    placed = response_column(VALUES, BATCH, starts=np.array([4, 0], np.int64), num_slots=8)

    assert (placed.tolist(), placed.dtype) == ([2, 3, 4, 0, 0, 1, 0, 0], np.int64)


def test_a_value_may_be_several_numbers() -> None:
    pairs = Ragged.from_rows([[[1, 2]], [[3, 4], [5, 6], [7, 8]]], np.float32)

    padded = left_padded_column(pairs, BATCH, response_width=3)
    line = response_column(pairs, BATCH, starts=np.array([0, 3], np.int64), num_slots=7)

    assert padded[0].tolist() == [[0, 0], [0, 0], [1, 2]]
    assert line.tolist() == [[0, 0], [1, 2], [0, 0], [3, 4], [5, 6], [7, 8], [0, 0]]


def test_another_number_of_values_than_response_tokens_is_refused() -> None:
    short = Ragged.from_rows([[1], [2]], np.int64)

    with pytest.raises(BatchingError, match="the column of row 1: 1 values for 3 response tokens"):
        left_padded_column(short, BATCH, response_width=3)
    with pytest.raises(BatchingError, match="the column of row 1: 1 values for 3 response tokens"):
        response_column(short, BATCH, starts=np.zeros(2, np.int64), num_slots=8)


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
    no_mask = replace(batch, loss_mask=Ragged(batch.loss_mask.values * 0, batch.loss_mask.offsets))

    np.testing.assert_array_equal(beside, padded.rewards_BR)
    starts = batch.input_ids.offsets[:-1].astype(np.int64)
    num_slots = int(batch.input_ids.offsets[-1])
    line = response_column(batch.rewards, no_mask, starts=starts, num_slots=num_slots)
    for row, start in enumerate(starts.tolist()):
        own = batch.rewards[row]
        first = start + max(int(batch.prompt_length[row]) - 1, 0)
        scored = own if batch.prompt_length[row] else own[1:]
        np.testing.assert_array_equal(line[first : first + len(scored)], scored)
