"""The average of a loss, and the scale of every row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

import testkit
from testkit.shares import count_denominators
from testkit.tensors import tensors_of
from turnstream.batching.config.values import Aggregation
from turnstream.errors import BatchingError, InvalidConfigError
from turnstream.types import Denominators, MiniBatch, Rows
from turnstream.worker.layouts import jagged_to_torch, packed_to_torch, right_padded_to_torch
from turnstream.worker.losses import aggregate
from turnstream.worker.tensors import to_torch

MODES = get_args(Aggregation)
LAYOUTS = [to_torch, right_padded_to_torch, packed_to_torch, jagged_to_torch]

# Rows A, B and C.
MASKS = ["1111", "1", "11"]
LOSSES = [[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 10.0], [0.0, 0.0, 2.0, 2.0]]


def losses(*rows: int) -> Tensor:
    return torch.tensor([LOSSES[row] for row in rows], dtype=torch.float64)


def test_averaged_over_undoes_the_average_of_two_ranks() -> None:
    denominators = tensors_of(MASKS).denominators
    options: Any = {"mode": "token_mean", "denominators": denominators, "averaged_over": 2}

    on_rank_0 = aggregate(losses(0), tensors_of(MASKS[:1]), **options)
    on_rank_1 = aggregate(losses(1, 2), tensors_of(["0001", "11"]), **options)

    assert ((on_rank_0 + on_rank_1) / 2).item() == pytest.approx(3.428571, abs=1e-6)


def test_aggregate_refuses_losses_of_another_shape() -> None:
    part = tensors_of(["11", "11"])

    with pytest.raises(BatchingError, match=r"\(2, 1\).*\(2, 2\)"):
        aggregate(torch.ones(2, 1), part, mode="token_mean", denominators=part.denominators)


@pytest.mark.parametrize(
    ("mode", "missing", "message"),
    [
        ("constant", "length_constant", r"one of token_mean, .* BatchStream\.config\.aggregation"),
        ("rollout_mean", "num_trajectories", "mini-batch of 7 trained tokens"),
        ("prompt_mean", "num_groups", "mini-batch of 7 trained tokens"),
    ],
)
def test_aggregate_refuses_a_mode_without_a_denominator(
    mode: Any, missing: str, message: str
) -> None:
    # In a run with another aggregation, the length constant is 0. The loss of mode "constant" was
    # then divided by 1, in silence: 24.0 here, and 1.0 in a run with a length constant of 8.
    part = tensors_of(MASKS, length_constant=8)
    denominators = part.denominators._replace(**{missing: 0})

    with pytest.raises(InvalidConfigError, match=message) as caught:
        aggregate(losses(0, 1, 2), part, mode=mode, denominators=denominators)

    assert caught.value.field == missing
    assert f"aggregation={mode!r}" in caught.value.message


_texts = st.from_regex(r"[a-c]\|[a-c]{1,2}[a-cA-C]{0,5}", fullmatch=True)


def _row_scales(rows: Rows, denominators: Denominators, mode: Aggregation) -> NDArray[np.float64]:
    """Return the factor of every row's sum of masked token losses, float64 (B,)."""
    trained_B = np.array([int(own.sum()) for own in rows.loss_mask])
    ones_B = np.ones(len(rows))
    match mode:
        case "token_mean":
            per_row_B, total = ones_B, denominators.num_tokens
        case "seq_mean_token_sum":
            per_row_B, total = ones_B, denominators.weight_sum
        case "seq_mean_token_mean":
            per_row_B, total = trained_B, denominators.weight_sum
        case "constant":
            per_row_B, total = ones_B, denominators.weight_sum * denominators.length_constant
        case "rollout_mean":
            per_row_B, total = rows.trajectory_num_tokens, denominators.num_trajectories
        case "prompt_mean":
            per_row_B, total = rows.group_num_tokens, denominators.num_groups
    scales_B = np.zeros(len(rows))
    live_B = trained_B > 0
    scales_B[live_B] = rows.weight[live_B] / (per_row_B[live_B] * (total or 1))
    return scales_B


@pytest.mark.parametrize("mode", MODES)
@given(
    rows_of=st.lists(st.tuples(_texts, st.sampled_from([0.25, 1.0, 2.0])), min_size=1, max_size=9),
    seed=st.integers(0, 2**32 - 1),
)
def test_aggregate_applies_the_row_scales_whatever_masked_tokens_hold(
    mode: Any, rows_of: list[tuple[str, float]], seed: int
) -> None:
    groups = [f"g{row // 2}" for row in range(len(rows_of))]
    rows = testkit.rows(*[text for text, _ in rows_of], group_ids=groups)
    rows = replace(rows, weight=np.array([weight for _, weight in rows_of], np.float32))
    denominators = count_denominators([rows], length_constant=9)
    part = to_torch(MiniBatch(rows=rows, info=testkit.mini_batch_info(rows)))
    mask_BR = part.loss_mask_BR.numpy()
    loss_BR = np.random.default_rng(seed).normal(0, 10, mask_BR.shape)
    loss_BR[~mask_BR] = np.nan
    given_BR = torch.from_numpy(loss_BR).requires_grad_()

    mean = aggregate(given_BR, part, mode=mode, denominators=denominators)
    mean.backward()

    scales_B = _row_scales(rows, denominators, mode)
    sums_B = np.where(mask_BR, loss_BR, 0).sum(axis=1)
    np.testing.assert_allclose(mean.item(), (scales_B * sums_B).sum(), rtol=1e-6, atol=1e-6)
    assert given_BR.grad is not None
    np.testing.assert_allclose(given_BR.grad.numpy(), scales_B[:, None] * mask_BR, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("convert", LAYOUTS, ids=lambda convert: convert.__name__)
def test_aggregate_takes_mode_and_denominators_from_the_batch(mode: Any, convert: Any) -> None:
    rows = testkit.rows("abCDE", "abF", "xyzW", group_ids=["g", "g", "h"])
    of = count_denominators([rows], length_constant=9)
    info = testkit.mini_batch_info(rows, denominators=of, aggregation=mode)
    tensors = convert(MiniBatch(rows=rows, info=info))
    parts = tensors if isinstance(tensors, list) else [tensors]

    for part in parts:
        loss = torch.arange(1.0, 1.0 + part.trained_tokens.numel()).reshape(
            part.trained_tokens.shape
        )
        expected = aggregate(loss, part, mode=mode, denominators=of)
        assert aggregate(loss, part).item() == expected.item() != 0
        other = of._replace(num_tokens=1, weight_sum=1.0, num_trajectories=1, num_groups=1)
        assert aggregate(loss, part, denominators=other).item() > expected.item()


def test_aggregate_names_the_missing_mode_of_an_older_release() -> None:
    part = tensors_of(MASKS)

    with pytest.raises(
        InvalidConfigError, match=r"^mode: .*pass mode=batches\.config\.aggregation"
    ):
        aggregate(losses(0, 1, 2), part)


def test_weight_of_a_masked_token_is_not_read() -> None:
    part = replace(tensors_of(["101"]), token_weights_BR=torch.tensor([[0.5, float("nan"), 2.0]]))
    loss_BR = torch.ones(1, 3, requires_grad=True)

    total = aggregate(loss_BR, part, mode="token_mean", denominators=part.denominators)
    total.backward()

    assert total.item() == 1.25
    assert loss_BR.grad is not None
    assert loss_BR.grad.tolist() == [[0.25, 0, 1]]
