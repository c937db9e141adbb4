"""Losses and corrections: finite gradients, derivatives, bounds, masks and extremes.

The trainer's tests compare every pair of settings with loops over tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from testkit.tensors import Case, cases
from turnstream.errors import BatchingError
from turnstream.worker import corrections, losses, policy_losses


def kl_to_old(estimate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda current, *, old_BR, mask_BR, **_: estimate(
        current, reference_BR=old_BR, mask_BR=mask_BR
    )


def selected(t: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with every second column selected."""
    columns = torch.arange(t["mask_BR"].shape[1]).expand(t["mask_BR"].shape)
    return {**t, "selected_BR": columns % 2 == 0}


LOSSES: dict[str, Callable[..., Tensor]] = {
    "ppo_clip": losses.ppo_clip,
    "dual_clip": lambda current, **t: losses.ppo_clip(current, dual_clip=3.0, **t),
    "gspo": losses.gspo,
    "cispo": losses.cispo,
    # Current and old are equal: only the weight exp(old - behaviour) is left, 0 above 5.
    "decoupled_ppo": lambda c, *, old_BR, **t: losses.decoupled_ppo(
        c, old_BR=c.detach(), behaviour_BR=old_BR, **t
    ),
    "kl_k1": kl_to_old(losses.kl_k1),
    "kl_k2": kl_to_old(losses.kl_k2),
    "kl_k3": kl_to_old(losses.kl_k3),
    "dppo": lambda c, *, old_BR, **t: policy_losses.dppo(c, behaviour_BR=old_BR, **t),
    "dppo kl": lambda c, *, old_BR, **t: policy_losses.dppo(
        c, behaviour_BR=old_BR, divergence="kl", **t
    ),
    "sapo": policy_losses.sapo,
    "gmpo": policy_losses.gmpo,
    "clip_cov": lambda c, **t: policy_losses.clip_cov(c, **selected(t)),
    "kl_cov": lambda c, **t: policy_losses.kl_cov(c, **selected(t)),
    "cross_entropy": lambda c, *, mask_BR, **_: losses.cross_entropy(c, mask_BR=mask_BR),
    "entropy_bonus": lambda c, *, mask_BR, **_: losses.entropy_bonus(
        c, mask_BR=mask_BR, coefficient=0.1
    ),
    "clipped_value_loss": lambda c, *, advantages_BR, **t: losses.clipped_value_loss(
        c, returns_BR=advantages_BR, **t
    ),
}


@given(cases(), st.sampled_from(sorted(LOSSES)))
def test_gradients_are_finite_and_0_where_not_trained(case: Case, name: str) -> None:
    t = case.tensors(skips="behaviour")
    current_BR = t.pop("current_BR").requires_grad_()

    loss_BR = LOSSES[name](current_BR, **t)
    loss_BR.sum().backward()

    assert current_BR.grad is not None
    assert torch.isfinite(loss_BR).all()
    assert torch.isfinite(current_BR.grad).all()
    assert (loss_BR[~t["mask_BR"]] == 0).all()
    assert (current_BR.grad[~t["mask_BR"]] == 0).all()


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"cispo", "decoupled_ppo"}))
def test_gradients_match_finite_differences(name: str) -> None:
    rng = np.random.default_rng(7)
    old_BR = torch.from_numpy(-rng.exponential(1.0, (3, 5)) - 0.2)
    current_BR = (old_BR + torch.from_numpy(rng.normal(0, 0.15, (3, 5)))).requires_grad_()
    t = {
        "old_BR": old_BR,
        "advantages_BR": torch.from_numpy(rng.normal(0, 1, (3, 5))),
        "mask_BR": torch.from_numpy(rng.random((3, 5)) < 0.7),
    }

    assert torch.autograd.gradcheck(lambda c: LOSSES[name](c, **t), (current_BR,), eps=1e-7)


def test_dppo_keeps_rare_tokens_that_ppo_clips() -> None:
    # From 0.001 to 0.01 the ratio is 10, and the policies differ by 0.009. From 0.6 to 0.8 the
    # ratio is 1.33, and they differ by 0.2. A probability above 1, from rounding, counts as 1.
    behaviour_BR = torch.tensor([[0.001, 0.6, 0.9]]).log()
    current_BR = torch.tensor([[0.01, 0.8, 1.1]]).log()

    is_masked_BR = policy_losses.dppo_masked(
        current_BR,
        behaviour_BR=behaviour_BR,
        advantages_BR=torch.ones(1, 3),
        mask_BR=torch.ones(1, 3),
    )

    assert is_masked_BR.tolist() == [[False, True, False]]


def test_covariances_are_products_of_deviations_where_trained() -> None:
    found_BR = policy_losses.covariances(
        torch.tensor([[-1.0, -4.0, -2.5]], requires_grad=True),
        advantages_BR=torch.tensor([[1.0, -0.75, 9.0]]),
        mask_BR=torch.tensor([[1, 1, 0]]),
        mean_logprob=-2.0,
        mean_advantage=0.25,
    )

    assert found_BR.tolist() == [[0.75, 2.0, 0.0]]
    assert not found_BR.requires_grad


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_masks_a_certain_token_that_became_unlikely(divergence: Any) -> None:
    is_masked_BR = policy_losses.dppo_masked(
        torch.tensor([[-1.0]]),
        behaviour_BR=torch.tensor([[0.0]]),
        advantages_BR=-torch.ones(1, 1),
        mask_BR=torch.ones(1, 1),
        divergence=divergence,
    )

    assert is_masked_BR.tolist() == [[True]]


def test_entropies_match_small_distributions() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, -math.inf, 0.0, -math.inf]])
    logits.requires_grad_()

    entropies = losses.token_entropies(logits, temperature=0.5)
    entropies.sum().backward()

    assert entropies.tolist() == pytest.approx([math.log(4), math.log(2)])
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    skewed = torch.tensor([[math.log(0.8), math.log(0.2)]])
    expected = -0.8 * math.log(0.8) - 0.2 * math.log(0.2)
    assert losses.token_entropies(skewed).item() == pytest.approx(expected)
    assert losses.token_entropies(skewed / 2, temperature=0.5).item() == pytest.approx(expected)


@pytest.mark.parametrize("gap", [1e30, -1e30, math.inf, -math.inf])
def test_exponents_are_clipped_to_20(gap: float) -> None:
    loss_BR = losses.ppo_clip(
        torch.tensor([[gap]]),
        old_BR=torch.zeros(1, 1),
        advantages_BR=torch.tensor([[-1.0]]),
        mask_BR=torch.ones(1, 1),
    )

    assert loss_BR.item() == pytest.approx(math.exp(20) if gap > 0 else 0.8, rel=1e-6)


def test_response_logprobs_accept_the_last_columns_alone() -> None:
    torch.manual_seed(0)
    logits_BTV, input_ids_BT = torch.randn(2, 6, 11), torch.randint(0, 11, (2, 6))
    options: Any = {"input_ids_BT": input_ids_BT, "response_width": 3, "temperature": 0.7}

    whole = losses.response_logprobs(logits_BTV, **options)

    assert torch.equal(whole, losses.response_logprobs(logits_BTV[:, -4:], **options))


@pytest.mark.parametrize(
    ("logits_BTV", "response_width", "temperature", "expected"),
    [
        (torch.tensor([[[0.0, 2.0], [9.0, 9.0]]]), 1, 2.0, [-math.log(1 + math.exp(-1.0))]),
        (torch.zeros(1, 3, 5, dtype=torch.bfloat16), 2, 1.0, [-math.log(5)] * 2),
        (torch.zeros(1, 3, 5), 0, 1.0, []),
    ],
    ids=["temperature", "bfloat16", "empty response"],
)
def test_response_logprobs_match_small_vectors(
    logits_BTV: Tensor, response_width: int, temperature: float, expected: list[float]
) -> None:
    actual = losses.response_logprobs(
        logits_BTV,
        input_ids_BT=torch.ones(logits_BTV.shape[:2], dtype=torch.int64),
        response_width=response_width,
        temperature=temperature,
    )

    assert actual.dtype == torch.float32
    assert actual[0].tolist() == pytest.approx(expected)


def test_response_logprobs_refuse_a_response_without_a_prompt() -> None:
    with pytest.raises(BatchingError, match="is a prompt empty"):
        losses.response_logprobs(
            torch.zeros(1, 2, 5), input_ids_BT=torch.ones(1, 2, dtype=torch.int64), response_width=2
        )


# ------------------------------------------------------------------------------ corrections

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
