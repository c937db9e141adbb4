from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import assert_same, rows
from testkit.shares import budgeted_passes, join_shares, rank_share
from testkit.strategies import scored_rows
from turnstream.batching.packing.microbatch import Budget, CostModel
from turnstream.batching.rows.assemble import take_rows
from turnstream.batching.rows.minibatch import cut_ranks, rows_multiple
from turnstream.errors import BatchingError
from turnstream.types import Rows

CUT: dict[str, Any] = {"step": 1, "mini_batch": 0, "pad_token_id": 9}


def shares(batch: Rows, world: int, **options: Any) -> list[Rows]:
    return [
        rank_share(batch, dp_rank=rank, dp_world_size=world, **CUT, **options)
        for rank in range(world)
    ]


# --------------------------------------------------------------------------------------
# what has to divide


def test_rows_divide_by_the_least_common_multiple_and_not_by_the_largest() -> None:
    assert rows_multiple(dp_world_size=8) == 8
    assert rows_multiple(dp_world_size=8, mini_batch_rows=12) == 24


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(BatchingError, match="each must be at least 1"):
        rows_multiple(dp_world_size=8, mini_batch_rows=0)
    with pytest.raises(BatchingError, match="each must be at least 1"):
        rows_multiple(dp_world_size=8, passes_multiple_of=0)


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=9),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 7),
    st.sampled_from(get_args(CostModel)),
    st.integers(0, 40),
)
def test_no_rank_is_short_of_rows_for_its_passes(
    lengths: list[int], world: int, passes_of: int, rows_of: int, model: CostModel, limit: int
) -> None:
    batch = rows(*["x|" + "A" * length for length in lengths])
    multiple = rows_multiple(
        dp_world_size=world, passes_multiple_of=passes_of, mini_batch_rows=rows_of
    )

    made = [
        budgeted_passes(
            batch,
            dp_rank=rank,
            dp_world_size=world,
            budget=Budget(limit=limit, model=model),
            passes_multiple_of=passes_of,
            multiple_of=multiple,
        )
        for rank in range(world)
    ]

    [num_passes] = {len(passes) for passes in made}
    [num_rows] = {sum(map(len, passes)) for passes in made}
    assert num_passes % passes_of == 0
    assert num_rows * world % rows_of == 0
    assert num_rows * world < len(batch) + multiple


# --------------------------------------------------------------------------------------
# another world


@given(scored_rows(), st.integers(1, 6), st.integers(1, 6), st.integers(1, 5))
def test_a_mini_batch_cut_for_one_world_can_be_cut_for_another(
    drawn: Rows, world: int, other_world: int, multiple: int
) -> None:
    batch = take_rows(drawn, np.flatnonzero(~drawn.is_padding).tolist())

    whole = join_shares(shares(batch, world, multiple_of=multiple))

    assert_same(whole, batch)
    for ours, again in zip(shares(batch, other_world), shares(whole, other_world), strict=True):
        assert_same(ours, again)


@pytest.mark.parametrize("sizes", [{"dp_world_size": 0}, {"dp_world_size": 1, "multiple_of": 0}])
def test_rows_for_no_rank_or_a_multiple_of_nothing_are_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(BatchingError, match=r"=0 .*must be at least 1"):
        cut_ranks(np.array([2]), **sizes)
