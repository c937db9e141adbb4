"""Advantages per token, in every layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import rows
from testkit.strategies import scored_rows
from turnstream.batching.layouts.jagged import jagged
from turnstream.batching.layouts.packed import packed
from turnstream.batching.layouts.padded import left_padded, right_padded
from turnstream.errors import BatchingError
from turnstream.types import Ragged, Rows


def trained_advantages(batch: Rows) -> list[list[float]]:
    """By layout, the advantages of all trained tokens, row by row; all others must be 0.0."""
    width = int(batch.input_ids.lengths.max(initial=0))
    left = left_padded(
        batch,
        width=width,
        response_width=int(batch.loss_mask.lengths.max(initial=0)),
        pad_token_id=9,
    )
    right = right_padded(batch, width=width, pad_token_id=9)
    flat = jagged(batch)
    (bin_of_all,) = packed(batch, bins=[range(len(batch))], pad_token_id=9, alignment=2)
    columns = [
        (left.advantages_BR, left.loss_mask_BR),
        (right.advantages_BT, right.loss_mask_BT),
        (flat.advantages_M, flat.loss_mask_M),
        (bin_of_all.advantages_N, bin_of_all.loss_mask_N),
    ]
    for values, mask in columns:
        assert values[~mask].tobytes() == bytes(4 * np.count_nonzero(~mask))
    return [values[mask].tolist() for values, mask in columns]


@given(batch=scored_rows(), data=st.data())
def test_every_layout_has_the_same_ones(batch: Rows, data: st.DataObject):
    number = st.floats(-9, 9, width=32) | st.just(np.nan)
    drawn = data.draw(st.lists(number, min_size=len(batch.loss_mask.values), max_size=99))
    values = np.array(drawn[: len(batch.loss_mask.values)], np.float32)
    is_trained = batch.loss_mask.values.astype(np.bool_)
    values[is_trained & np.isnan(values)] = 1.0

    found = trained_advantages(replace(batch, advantages=Ragged(values, batch.loss_mask.offsets)))

    assert found == [values[is_trained].tolist()] * 4


@given(batch=scored_rows())
def test_number_per_row_equals_that_number_at_every_token(batch: Rows):
    per_token = np.repeat(batch.advantage, batch.loss_mask.lengths)

    spread = replace(batch, advantages=Ragged(per_token, batch.loss_mask.offsets))

    assert trained_advantages(spread) == trained_advantages(replace(batch, advantages=None))


def test_another_number_of_them_than_response_tokens_is_refused():
    batch = replace(rows("abC"), advantages=Ragged.from_rows([[1.0, 2.0]], np.float32))

    with pytest.raises(BatchingError, match="advantages of row 0: 2 values for 1 response tokens"):
        jagged(batch)
