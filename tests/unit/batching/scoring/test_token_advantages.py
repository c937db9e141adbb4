from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import rows
from turnstream.batching.scoring.token_advantages import (
    gae,
    reinforce_plus_plus,
    token_returns,
    token_rewards,
    vapo_lambda,
    whiten_tokens,
)
from turnstream.errors import BatchingError, UnsupportedEstimatorError
from turnstream.types import Ragged, Rows

GOLDEN = rows("x|ABcdE")
GOLDEN_REWARDS = Ragged.from_rows([[0, 0, 0, 0, 1]], np.float32)


def lists(ragged: Ragged[np.float32]) -> list[list[float]]:
    return [row.tolist() for row in ragged]


def test_gae_carries_values_over_observed_tokens() -> None:
    # Without carrying, the 9s of the observed tokens give 1.208 and 1.166.
    values = Ragged.from_rows([[0.5, 0.6, 9, 9, 0.7]], np.float32)

    advantages, returns = gae(GOLDEN, rewards=GOLDEN_REWARDS, values=values)

    assert lists(advantages) == [pytest.approx([0.46575, 0.385, 0, 0, 0.3])]
    assert lists(returns) == [pytest.approx([0.96575, 0.985, 0, 0, 1.0])]


def test_case_39_whitening_covers_trained_tokens_only() -> None:
    # The reference's mean is 7/6, over all six cells; over the four trained ones it is 7/4.
    mask = Ragged.from_rows([[0, 0, 1], [1, 1, 1]], np.uint8)
    values = Ragged.from_rows([[0, 0, 1], [2, 2, 2]], np.float32)

    white = whiten_tokens(values, loss_mask=mask)

    std = np.sqrt(((1 - 1.75) ** 2 + 3 * (2 - 1.75) ** 2) / 4)
    assert lists(white) == [
        pytest.approx([0, 0, -0.75 / std]),
        pytest.approx([0.25 / std] * 3),
    ]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("outcome", [[0, 0, 0, 0.5], [], [2], [0]]),
        ("last_turn", [[0, 0, 0, 0.5], [], [2], [0]]),
        ("sum_of_turns", [[0.5, 0, 0.5, -0.5], [], [2], [0]]),
    ],
)
def test_token_rewards_of_a_row_sum_to_its_planned_reward(
    source: Any, expected: list[list[float]]
) -> None:
    # The first row has turn rewards of 1, and a penalty of 0.5 for its length.
    batch = rows(
        "x|AbCd", "x|", "x|E", "x|y", rewards=[0.5, 7, 2, 9], is_padding=[False, False, False, True]
    )
    of_turns = Ragged.from_rows([[0.5, 0, 0.5, 0], [], [2], [0]], np.float32)

    found = token_rewards(replace(batch, rewards=of_turns), source=source)

    assert lists(found) == expected
    assert found.values.dtype == np.float32


def test_whitening_over_ranks_equals_that_of_all_rows() -> None:
    whole, _, values = random_batch(3)
    trained = values.values[whole.loss_mask.values.astype(bool)].astype(np.float64)
    totals = [len(trained), trained.sum(), ((trained - trained.mean()) ** 2).sum()]
    found: list[list[float]] = []

    for part in (slice(0, 1), slice(1, len(whole))):
        sums = iter(totals)
        cut = [_rows_of(column, part) for column in (values, whole.loss_mask)]
        white = whiten_tokens(cut[0], loss_mask=cut[1], sum_ranks=lambda _, sums=sums: next(sums))
        found += lists(white)
        assert list(sums) == []

    expected = whiten_tokens(values, loss_mask=whole.loss_mask)
    assert found == [pytest.approx(row, rel=1e-6) for row in lists(expected)]


def _rows_of(column: Ragged[Any], part: slice) -> Ragged[Any]:
    return Ragged(column.values, column.offsets[part.start : part.stop + 1])


def test_vapo_lambda_looks_further_in_longer_chains() -> None:
    found = vapo_lambda(np.array([10, 100, 1000, 0]))

    assert found.tolist() == pytest.approx([0.0, 0.8, 0.98, 0.0])


@pytest.mark.parametrize("estimator", ["gae", "reinforce_pp"])
def test_refuses_a_trajectory_that_was_split_into_rows(estimator: str) -> None:
    parts = {"is_last": np.array([False, True]), "sequence_index": np.array([0, 1], np.int32)}
    batch = replace(rows("x|A", "x|B"), **parts)
    ones = Ragged.from_rows([[1], [1]], np.float32)

    estimate = {"gae": partial(gae, values=ones), "reinforce_pp": reinforce_plus_plus}[estimator]

    with pytest.raises(UnsupportedEstimatorError, match=f"^{estimator} .* g0/0/0 is split"):
        estimate(batch, rewards=ones)


def test_refuses_values_that_are_not_aligned_with_the_responses() -> None:
    with pytest.raises(BatchingError, match="one value per response token"):
        token_returns(rows("x|AB"), rewards=Ragged.from_rows([[1]], np.float32))


def slow_gae(
    batch: Rows, rewards: Ragged[np.float32], values: Ragged[np.float32], gamma: float, lam: float
) -> list[list[float]]:
    result: list[list[float]] = []
    for mask, own_rewards, own_values in zip(batch.loss_mask, rewards, values, strict=True):
        advantages = [0.0] * len(mask)
        value_ahead = advantage_ahead = waiting = 0.0
        for t in range(len(mask) - 1, -1, -1):
            waiting += float(own_rewards[t])
            if mask[t]:
                value = float(own_values[t])
                advantage_ahead = (
                    waiting + gamma * value_ahead - value + gamma * lam * advantage_ahead
                )
                value_ahead, waiting = value, 0.0
                advantages[t] = advantage_ahead
        result.append(advantages)
    return result


def random_batch(seed: int) -> tuple[Rows, Ragged[np.float32], Ragged[np.float32]]:
    rng = np.random.default_rng(seed)
    letters = "aB"
    texts = [
        "x|" + "".join(letters[i] for i in rng.integers(0, 2, rng.integers(0, 40)))
        for _ in range(rng.integers(1, 5))
    ]
    batch = rows(*texts)
    numbers = [rng.standard_normal(len(text) - 2) for text in texts]
    more = [rng.standard_normal(len(text) - 2) for text in texts]
    return batch, Ragged.from_rows(numbers, np.float32), Ragged.from_rows(more, np.float32)


@given(
    st.integers(0, 2**32 - 1), st.sampled_from([1.0, 0.9, 0.0]), st.sampled_from([1.0, 0.5, None])
)
def test_gae_agrees_with_a_loop_over_tokens(seed: int, gamma: float, lam: float | None) -> None:
    batch, rewards, values = random_batch(seed)
    by_row = np.linspace(0.2, 1.0, len(batch))

    advantages, returns = gae(
        batch, rewards=rewards, values=values, gamma=gamma, lam=by_row if lam is None else lam
    )

    assert (advantages.values.dtype, returns.values.dtype) == (np.float32, np.float32)
    for row, own in enumerate(by_row.tolist()):
        slow = slow_gae(batch, rewards, values, gamma, own if lam is None else lam)[row]
        assert advantages[row].tolist() == pytest.approx(slow, rel=1e-5, abs=1e-5)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 0.9]))
def test_returns_agree_with_a_loop_over_tokens(seed: int, gamma: float) -> None:
    batch, rewards, values = random_batch(seed)
    nothing = Ragged(np.zeros_like(values.values), values.offsets)

    returns = token_returns(batch, rewards=rewards, gamma=gamma)

    # With values of 0 and lambda 1 the advantage is the discounted return.
    for found, slow in zip(
        lists(returns), slow_gae(batch, rewards, nothing, gamma, 1.0), strict=True
    ):
        assert found == pytest.approx(slow, rel=1e-5, abs=1e-5)


def from_row_1(column: Any) -> Any:
    return Ragged(column.values, column.offsets[1:]) if isinstance(column, Ragged) else column[1:]


def test_a_slice_of_a_larger_batch_is_computed_alone() -> None:
    # Whitening took the mean over the rows before the slice too, and the others broke.
    whole, alone = rows("xYZ", "abC", "aBd"), rows("abC", "aBd")
    names = ("row_id", "input_ids", "loss_mask", "is_padding", "is_last", "sequence_index")
    part = replace(whole, **{name: from_row_1(getattr(whole, name)) for name in names})
    sliced = from_row_1(Ragged.from_rows([[9, 9], [1], [2, 0]], np.float32))
    own = Ragged.from_rows([[1], [2, 0]], np.float32)

    assert lists(whiten_tokens(sliced, loss_mask=part.loss_mask)) == lists(
        whiten_tokens(own, loss_mask=alone.loss_mask)
    )
    for found, expected in zip(
        gae(part, rewards=sliced, values=sliced), gae(alone, rewards=own, values=own), strict=True
    ):
        assert lists(found) == lists(expected)


def test_no_rows_have_no_advantages() -> None:
    nothing = Ragged.from_rows([], np.float32)

    advantages, returns = gae(rows(), rewards=nothing, values=nothing)

    assert (len(advantages), len(returns)) == (0, 0)
    assert len(reinforce_plus_plus(rows(), rewards=nothing)) == 0


def test_inert_row_is_no_part_of_a_trajectory_and_in_no_mean() -> None:
    values = [[0, 0, 2], [1]]
    padded = rows("x|AbC", "x|D", "a|b", is_padding=[False, False, True])
    padded = replace(padded, is_last=np.array([True, True, False]))

    alone = reinforce_plus_plus(rows("x|AbC", "x|D"), rewards=Ragged.from_rows(values, np.float32))
    found = reinforce_plus_plus(padded, rewards=Ragged.from_rows([*values, [7]], np.float32))

    assert lists(found) == [*lists(alone), [0]]
