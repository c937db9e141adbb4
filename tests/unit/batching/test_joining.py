"""Optional columns of rows that are cut, put together and filled up with inert rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import assert_same, mini_batch_info, operation_rows, rows
from testkit.shares import join_shares, rank_share
from testkit.strategies import mini_batches, operation_mini_batches
from turnstream.batching.rows.assemble import concatenate_rows, joined_column, take_rows
from turnstream.batching.rows.minibatch import cut_ranks
from turnstream.errors import BatchingError
from turnstream.records.batches import decode_mini_batch, encode_mini_batch
from turnstream.types import Extent, ExtraColumn, MiniBatch, Ragged, Rows


def with_extra(
    built: Rows, *, per: Extent = "items", shape: tuple[int, ...] = (2,), dtype: Any = np.int16
) -> Rows:
    values = [np.full((row + 1, *shape), row, dtype) for row in range(len(built))]
    return replace(
        built, extras={"x": ExtraColumn(per=per, values=Ragged.from_rows(values, dtype))}
    )


@given(mini=mini_batches() | operation_mini_batches(), data=st.data())
def test_taken_rows_have_their_own_values(mini: MiniBatch, data: st.DataObject):
    order = data.draw(st.permutations(range(len(mini.rows))))

    taken = take_rows(mini.rows, order)

    assert taken.row_id.tolist() == mini.rows.row_id[order].tolist()
    for place, position in enumerate(order):
        assert_same(take_rows(taken, [place]), take_rows(mini.rows, [position]))
    assert_same(take_rows(taken, np.argsort(order).tolist()), mini.rows)


@given(mini=mini_batches() | operation_mini_batches())
def test_shares_of_all_ranks_join_to_the_mini_batch(mini: MiniBatch):
    numbers = np.arange(len(mini.rows), dtype=np.int64)
    real = replace(mini.rows, row_id=np.where(mini.rows.is_padding, -1 - numbers, numbers))
    real = take_rows(real, np.flatnonzero(~real.is_padding).tolist())

    shares = [
        rank_share(real, step=1, mini_batch=0, dp_rank=r, dp_world_size=3, pad_token_id=9)
        for r in range(3)
    ]
    decoded = [
        decode_mini_batch(
            encode_mini_batch(MiniBatch(rows=share, info=mini_batch_info(share))).data
        )
        for share in shares
    ]

    cut = cut_ranks(real.input_ids.lengths, dp_world_size=3)
    own = [share.row_id[~share.is_padding].tolist() for share in shares]
    assert own == [real.row_id[[at for at in of if at < len(real)]].tolist() for of in cut]
    assert_same([mini.rows for mini in decoded], shares)
    assert_same(join_shares(shares), real)


def test_inert_rows_of_operations_have_targets_without_weight_and_extras_without_values():
    batch = with_extra(operation_rows("ABC", num_targets=2))

    share = rank_share(batch, step=1, mini_batch=0, dp_rank=1, dp_world_size=2, pad_token_id=9)

    assert share.is_padding.tolist() == [True]
    assert share.operations
    assert share.operations.request_id == [""]
    assert share.operations.target_ids[0].tolist() == [[0, 0], [0, 0]]
    assert share.operations.target_weights[0].tolist() == [[0, 0], [0, 0]]
    assert share.extras["x"].values[0].shape == (0, 2)
    assert share.extras["x"].dtype == np.int16


@pytest.mark.parametrize(
    ("reason", "parts"),
    [
        ("operations to concatenate: OperationColumns and None", [operation_rows("AB"), rows("C")]),
        (
            r"extras .*: the columns \['x'\] and the columns \[\]",
            [with_extra(rows("aB")), rows("C")],
        ),
        (
            r"target_ids .*: int64\[\] and int64\[2\]",
            [operation_rows("AB"), operation_rows("C", num_targets=2, first_row_id=2)],
        ),
        ("per .*: 'items' and 'row'", [with_extra(rows("aB")), with_extra(rows("aB"), per="row")]),
        (
            r"values .*: int32\[2\] and int16\[3\]",
            [with_extra(rows("aB"), dtype=np.int32), with_extra(rows("aB"), shape=(3,))],
        ),
    ],
)
def test_parts_whose_columns_do_not_go_together_are_refused(reason: str, parts: list[Rows]):
    with pytest.raises(BatchingError, match=reason):
        concatenate_rows(parts)


def test_more_tokens_than_int32_offsets_count_are_refused():
    column = Ragged(np.zeros(0, np.int32), np.array([0, 2**30], np.int32))  # not read before

    with pytest.raises(BatchingError, match="2147483648 values in one mini-batch"):
        joined_column([column, column])


def test_slices_of_larger_columns_are_joined_without_what_stands_around_them():
    whole = Ragged.from_rows([[1], [2, 3], [4]], np.int32)
    part = Ragged(whole.values, whole.offsets[1:3])

    joined = joined_column([part, part])

    assert [row.tolist() for row in joined] == [[2, 3], [2, 3]]
    assert joined.offsets.tolist() == [0, 2, 4]
