from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import rows
from testkit.shares import count_denominators, rank_share, weighted
from turnstream.batching.config.values import RowWeights
from turnstream.batching.scoring.denominators import ShareCounts, check_share, num_trained
from turnstream.errors import BatchingError
from turnstream.types import Ragged, Rows

CUT: dict[str, Any] = {"step": 1, "mini_batch": 0, "pad_token_id": 0}
ABC = rows("x|ABCD", "x|E", "x|FG")


def test_a_row_without_a_response_has_no_trained_token_of_its_neighbour() -> None:
    assert num_trained(rows("x|AB", "x|", "x|C", "x|")).tolist() == [2, 0, 1, 0]


def fan_out() -> Rows:
    """A trajectory in two rows (3 and 1 trained tokens) beside one in one row (2)."""
    batch = rows("x|ABC", "x|D", "x|EF", group_ids=["a", "a", "a"])
    return replace(
        batch,
        trajectory_id=["a/0/0", "a/0/0", "a/1/0"],
        trajectory_num_tokens=np.array([4, 4, 2], np.int64),
    )


def denominators_of(batch: Rows) -> Any:
    return count_denominators([batch], length_constant=0)


@pytest.mark.parametrize("name", ShareCounts._fields)
def test_share_is_within_the_mini_batch_and_all_of_it_on_the_only_rank(name: str) -> None:
    planned = denominators_of(ABC)
    wrong = planned._replace(**{name: getattr(planned, name) + 1})

    check_share(ABC, wrong, dp_world_size=2)
    with pytest.raises(BatchingError, match=f"^{name}: "):
        check_share(ABC, wrong, dp_world_size=1)
    with pytest.raises(BatchingError, match=f"^{name}: the share of one of 2 ranks has"):
        check_share(ABC, planned._replace(**{name: 0}), dp_world_size=2)


def inert(text: str, weight: float) -> Rows:
    share = rows("x|A", text, is_padding=[False, True])
    return replace(share, weight=np.array([1, weight], np.float32))


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (inert("x|A", 0), "inert row -2 has"),
        (inert("x|a", 1), "inert row -2 has"),
        *[
            (replace(ABC, **{column: np.array([4, 0, 2])}), "row 1 has 1 trained tokens")
            for column in ("trajectory_num_tokens", "group_num_tokens")
        ],
    ],
)
def test_row_that_is_live_or_has_more_tokens_than_its_owner_is_refused(
    share: Rows, message: str
) -> None:
    with pytest.raises(BatchingError, match=message):
        check_share(share, denominators_of(ABC), dp_world_size=2)


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("per_row", [0.75, 0.25, 1]),
        ("per_row", [0.5, 0.5, 1]),
        ("per_trajectory", [0.75, 0.25, 1]),
        ("per_trajectory", [0, 1, 1]),
        ("per_trajectory", [0.5, 0.5, -1]),
        ("per_trajectory", [0.5, 0.5, 2]),
        ("rollout_mean", [0.5, 0.5, 1]),
        ("rollout_mean", [1, 1, 1]),
    ],
)
def test_rows_that_weigh_something_else_are_refused(kind: RowWeights, weights: list[float]) -> None:
    share = replace(fan_out(), weight=np.array(weights, np.float32))

    with pytest.raises(BatchingError, match=f"row . of . of the . .* which is not {kind}"):
        check_share(share, denominators_of(share), dp_world_size=1, row_weights=kind)


def test_a_single_token_is_missed_among_millions() -> None:
    # A tolerance in proportion to the whole let a share lose one token in every million.
    num_tokens = 3_000_000
    batch = rows("aB")
    columns: dict[str, Any] = {
        "input_ids": Ragged(np.ones(num_tokens + 1, np.int32), np.array([0, num_tokens + 1])),
        "loss_mask": Ragged(np.ones(num_tokens, np.uint8), np.array([0, num_tokens])),
        "trajectory_num_tokens": np.array([num_tokens]),
        "group_num_tokens": np.array([num_tokens]),
    }
    batch = replace(batch, **columns)
    planned = count_denominators([batch], length_constant=0)

    check_share(batch, planned, dp_world_size=1)
    for wrong, world in ((num_tokens + 1, 1), (num_tokens - 1, 2)):
        with pytest.raises(BatchingError, match=r"^num_tokens: "):
            check_share(batch, planned._replace(num_tokens=wrong), dp_world_size=world)


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


@given(split_batches(), st.sampled_from(get_args(RowWeights)), st.integers(1, 9), st.integers(1, 3))
def test_shares_of_any_ranks_pass_and_add_up(
    batch: Rows, kind: RowWeights, dp_world_size: int, multiple_of: int
) -> None:
    batch = weighted(batch, kind)
    planned = count_denominators([batch], length_constant=3)
    ranks: dict[str, Any] = {"dp_world_size": dp_world_size, "multiple_of": multiple_of}

    shares = [rank_share(batch, dp_rank=r, **ranks, **CUT) for r in range(dp_world_size)]

    assert count_denominators(shares, length_constant=3) == planned
    for share in shares:
        check_share(share, planned, dp_world_size=dp_world_size, row_weights=kind)
