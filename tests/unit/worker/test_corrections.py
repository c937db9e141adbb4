"""Every correction against a loop over rows and tokens, and its golden vectors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from testkit.tensors import Case, cases
from turnstream.worker import corrections

# The vector of the definitions: four tokens of one row.
OLD = torch.tensor([[-1.0, -2.0, -0.5, -3.0]], dtype=torch.float64)
BEHAVIOUR = torch.tensor([[-1.2, -4.0, -0.5, -2.0]], dtype=torch.float64)
ALL = torch.ones(1, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("importance_ratio", {"level": "token"}, [1.2214, 7.3891, 1.0, 0.3679]),
        ("importance_ratio", {"level": "sequence"}, [3.3201] * 4),
        ("importance_ratio", {"level": "geometric"}, [1.3499] * 4),
        ("tis", {"cap": 2.0}, [1.2214, 2.0, 1.0, 0.3679]),
        ("tis", {"floor": 0.5}, [1.2214, 2.0, 1.0, 0.5]),
        ("tis", {"level": "sequence", "cap": 2.0}, [2.0] * 4),
        ("tis", {"level": "geometric", "cap": 2.0}, [1.3499] * 4),
        ("icepop", {}, [1.2214, 0.0, 1.0, 0.0]),
        ("mis", {}, [1, 0, 1, 0]),
        ("mis", {"level": "sequence"}, [0] * 4),
        ("mis", {"level": "geometric"}, [0] * 4),
        ("mis", {"level": "geometric", "low": 0.5, "high": 2.0}, [1] * 4),
        ("seq_mask_tis", {}, [0] * 4),
        ("seq_mask_tis", {"high": 1.35}, [1.2214, 7.3891, 1.0, 0.3679]),
    ],
)
def test_correction_matches_the_golden_vector(
    name: str, options: Any, expected: list[float]
) -> None:
    result = getattr(corrections, name)(OLD, behaviour_BR=BEHAVIOUR, mask_BR=ALL, **options)

    assert [round(value, 4) for value in result[0].tolist()] == expected


def test_mis_vetoes_a_row_with_an_almost_impossible_token() -> None:
    behaviour_BR = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]])
    old_BR = torch.tensor([[-1.0, -1.0 + math.log(0.9e-4)], [-1.0, -1.0 + math.log(1.1e-4)]])

    vetoed = corrections.mis(old_BR, behaviour_BR=behaviour_BR, mask_BR=torch.ones(2, 2), low=0.0)

    assert vetoed.tolist() == [[0, 0], [1, 1]]


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


def assert_equal_where_trained(actual: Tensor, expected: np.ndarray, case: Case) -> None:
    assert not actual.requires_grad
    assert torch.isfinite(actual).all()
    np.testing.assert_allclose(actual.numpy()[case.mask], expected[case.mask], rtol=1e-12)


@given(cases())
def test_opsm_equals_the_loop(case: Case) -> None:
    expected = np.ones(case.mask.shape)
    for row, live in enumerate(case.mask):
        gap = (case.old[row][live] - case.current[row][live]).sum() / max(1, live.sum())
        expected[row] = [float(not (a < 0 and gap > 0.1)) for a in case.advantages[row]]

    actual = corrections.opsm(
        torch.from_numpy(case.current).requires_grad_(),
        old_BR=torch.from_numpy(case.old),
        advantages_BR=torch.from_numpy(case.advantages),
        mask_BR=torch.from_numpy(case.mask),
        delta=0.1,
    )

    assert_equal_where_trained(actual, expected, case)


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
