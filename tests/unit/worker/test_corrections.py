"""Bounds, masks and extremes of corrections.

The trainer's tests compare each correction with loops over tokens.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from turnstream.worker import corrections

OLD = torch.tensor([[-1.0, -2.0, -0.5, -3.0]], dtype=torch.float64)
ALL = torch.ones(1, 4, dtype=torch.bool)


def test_row_veto_ignores_masked_tokens_and_has_no_gradient() -> None:
    old_BR = torch.tensor([[-0.5, -1.0]], requires_grad=True)

    vetoed = corrections.row_veto(
        old_BR,
        behaviour_BR=torch.full((1, 2), -1.0),
        mask_BR=torch.tensor([[1, 0]]),
        low=1.5,
        high=2.0,
    )

    assert vetoed.tolist() == [[1, 1]]
    assert not vetoed.requires_grad


def test_ratio_on_the_bound_is_inside() -> None:
    on_policy: Any = {"behaviour_BR": OLD, "mask_BR": ALL, "low": 1.0, "high": 1.0}

    assert corrections.icepop(OLD, **on_policy).tolist() == [[1.0] * 4]
    assert corrections.mis(OLD, **on_policy).tolist() == [[1.0] * 4]
    assert corrections.seq_mask_tis(OLD, **on_policy).tolist() == [[1.0] * 4]


def test_rescaled_weights_have_a_mean_of_1_over_all_ranks() -> None:
    shares = [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]])]
    weight_sum = sum(share.sum() for share in shares)

    scaled = [corrections.rescaled(s, weight_sum=weight_sum, num_tokens=4) for s in shares]

    assert torch.cat(scaled).mean().item() == 1.0
    assert scaled[0].tolist() == [[2.0, 0.0]]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_extreme_ratios_are_finite(level: Any) -> None:
    ratio = corrections.importance_ratio(
        torch.tensor([[0.0], [-1e30]]),
        behaviour_BR=torch.tensor([[-1e30], [0.0]]),
        mask_BR=torch.ones(2, 1),
        level=level,
    )

    assert ratio[0, 0].item() == pytest.approx(math.exp(20), rel=1e-6)
    assert ratio[1, 0].item() == pytest.approx(math.exp(-20), rel=1e-6)


@pytest.mark.parametrize("weight_sum", [0.0, torch.tensor(0.0)])
def test_rescaled_weights_of_0_stay_0(weight_sum: Any) -> None:
    # Dividing by their sum made every token NaN where a filter had taken all of them out.
    scaled = corrections.rescaled(torch.zeros(1, 2), weight_sum=weight_sum, num_tokens=2)

    assert scaled.tolist() == [[0, 0]]
