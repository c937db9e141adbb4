from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import rows
from testkit.denominators import (
    count_denominators,
    loss,
    weighted,
)
from testkit.shares import budgeted_passes, rank_share
from turnstream.batching.config.values import Aggregation, RowWeights
from turnstream.batching.packing.microbatch import Budget, CostModel
from turnstream.batching.rows.assemble import take_rows
from turnstream.batching.rows.minibatch import rows_multiple
from turnstream.batching.scoring.denominators import check_share
from turnstream.types import Rows

CUT: dict[str, Any] = {"step": 1, "mini_batch": 0, "pad_token_id": 0}
MODES: tuple[Aggregation, ...] = get_args(Aggregation)


SPLIT_MODES: list[tuple[RowWeights, Aggregation]] = [
    *[("per_row", mode) for mode in MODES],
    ("per_trajectory", "seq_mean_token_sum"),
    ("per_trajectory", "seq_mean_token_mean"),
    ("per_trajectory", "constant"),
    ("rollout_mean", "seq_mean_token_mean"),
]
"""Every setting that a configuration takes."""


@st.composite
def split_batches(draw: st.DrawFn) -> Rows:
    """Trajectories of one row or more, each within one of two groups."""
    texts = draw(st.lists(st.text("aB", max_size=6), min_size=1, max_size=7))
    owners = [draw(st.integers(0, 3)) for _ in texts]
    batch = rows(*["x|" + text for text in texts], group_ids=[f"g{own % 2}" for own in owners])
    totals = [
        sum(t.count("B") for t, o in zip(texts, owners, strict=True) if o == own) for own in owners
    ]
    return replace(
        batch,
        trajectory_id=[f"g{own % 2}/{own}/0" for own in owners],
        sample=np.array(owners, np.int32),
        trajectory_num_tokens=np.array(totals, np.int64),
    )


@given(
    split_batches(),
    st.sampled_from(SPLIT_MODES),
    st.integers(1, 5),
    st.sampled_from(get_args(CostModel)),
    st.integers(1, 3),
    st.randoms(),
)
def test_loss_with_any_row_weights_is_independent_of_cut_and_order(
    batch: Rows,
    setting: tuple[RowWeights, Aggregation],
    dp_world_size: int,
    model: CostModel,
    passes_multiple_of: int,
    random: Any,
) -> None:
    kind, mode = setting
    cut = {
        "dp_world_size": dp_world_size,
        "multiple_of": rows_multiple(
            dp_world_size=dp_world_size, passes_multiple_of=passes_multiple_of
        ),
    }
    budget = Budget(limit=9, model=model)
    batch = weighted(batch, kind)
    shuffled = take_rows(batch, random.sample(range(len(batch)), len(batch)))

    def token_losses(share: Rows) -> list[list[float]]:
        return [
            [float(row_id * 7 + t) for t in range(length)]
            for row_id, length in zip(share.row_id.tolist(), share.loss_mask.lengths, strict=True)
        ]

    denominators = count_denominators([batch], length_constant=5)
    total = 0.0
    for dp_rank in range(dp_world_size):
        share = rank_share(shuffled, dp_rank=dp_rank, **cut, **CUT)
        check_share(share, denominators, dp_world_size=dp_world_size, row_weights=kind)
        passes = budgeted_passes(
            shuffled, dp_rank=dp_rank, budget=budget, passes_multiple_of=passes_multiple_of, **cut
        )
        for positions in passes:
            part = take_rows(share, positions)
            total += loss(part, token_losses(part), mode, of=batch, constant=5)

    assert total == pytest.approx(loss(batch, token_losses(batch), mode, of=batch, constant=5))


@st.composite
def batches(draw: st.DrawFn) -> Rows:
    texts = draw(st.lists(st.text("aB", max_size=6), min_size=1, max_size=7))
    names = draw(st.lists(st.sampled_from("gh"), min_size=len(texts), max_size=len(texts)))
    return rows(*["x|" + text for text in texts], group_ids=names)


@given(batches(), st.integers(1, 9))
def test_denominators_counted_over_ranks_are_those_of_the_whole(batch: Rows, world: int) -> None:
    shares = [rank_share(batch, dp_rank=r, dp_world_size=world, **CUT) for r in range(world)]

    counted = count_denominators(shares, length_constant=3)

    assert counted == count_denominators([batch], length_constant=3)
    for share in shares:
        check_share(share, counted, dp_world_size=world)
