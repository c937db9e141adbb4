"""Losses beyond the clipped ratio against loops over rows and tokens, and their golden vectors."""

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

from testkit.tensors import Case, cases, clipped_exp
from turnstream.worker import losses, policy_losses


def loop(case: Case, token_loss: Callable[[int, int], float]) -> np.ndarray:
    """`token_loss(row, t)` where trained, 0 elsewhere."""
    loss = np.zeros(case.mask.shape)
    for row, t in zip(*np.nonzero(case.mask), strict=True):
        loss[row, t] = token_loss(row, t)
    return loss


def assert_equals(actual: Tensor, expected: np.ndarray, *, atol: float = 1e-300) -> None:
    np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=1e-12, atol=atol)


def binary_divergence(p: float, q: float, kind: str) -> float:
    """The divergence of "the sampled token or another one", from its two probabilities."""
    if kind == "tv":
        return abs(p - q)
    p, q = min(p, 1 - 1e-7), min(q, 1 - 1e-7)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)) if p > 0 else 0.0


@given(cases(), st.sampled_from(["tv", "kl"]), st.sampled_from([None, 1e-3]))
def test_dppo_equals_the_loop(case: Case, kind: Any, threshold: float | None) -> None:
    limit = threshold if threshold is not None else {"tv": 0.15, "kl": 0.05}[kind]

    def token_loss(row: int, t: int) -> float:
        now, before = case.current[row, t], case.behaviour[row, t]
        a, moved = case.advantages[row, t], now - before
        divergence = binary_divergence(math.exp(before), math.exp(min(now, 0.0)), kind)
        return 0.0 if a * moved > 0 and divergence > limit else -clipped_exp(moved) * a

    t = case.tensors(skips="old")
    actual = policy_losses.dppo(t.pop("current_BR"), **t, divergence=kind, threshold=threshold)

    assert_equals(actual, loop(case, token_loss))


@given(cases())
def test_sapo_equals_the_loop(case: Case) -> None:
    def token_loss(row: int, t: int) -> float:
        a = case.advantages[row, t]
        u, tau = clipped_exp(case.current[row, t] - case.old[row, t]), 2.0 if a > 0 else 3.0
        return -4 / tau / (1 + math.exp(-min(700.0, tau * (u - 1)))) * a

    t = case.tensors(skips="behaviour")
    actual = policy_losses.sapo(
        t.pop("current_BR"), **t, temperature_positive=2.0, temperature_negative=3.0
    )

    assert_equals(actual, loop(case, token_loss))


@given(cases())
def test_gmpo_equals_the_loop(case: Case) -> None:
    def clipped(row: int, t: int) -> float:
        x = case.current[row, t] - case.old[row, t]
        return max(x, -0.3) if case.advantages[row, t] < 0 else min(x, 0.5)

    def token_loss(row: int, t: int) -> float:
        live = np.flatnonzero(case.mask[row]).tolist()
        mean = sum(clipped(row, each) for each in live) / len(live)
        return -clipped_exp(mean) * case.advantages[row, t]

    t = case.tensors(skips="behaviour")
    actual = policy_losses.gmpo(t.pop("current_BR"), **t, clip_low=0.3, clip_high=0.5)

    assert_equals(actual, loop(case, token_loss))


@given(cases(), st.integers(0, 99))
def test_covariance_losses_equal_the_loops(case: Case, seed: int) -> None:
    selected = np.random.default_rng(seed).random(case.mask.shape) < 0.5

    def x(row: int, t: int) -> float:
        return case.current[row, t] - case.old[row, t]

    def clip_cov(row: int, t: int) -> float:
        u, a = clipped_exp(x(row, t)), case.advantages[row, t]
        return 0.0 if selected[row, t] else -min(u * a, max(0.8, min(1.28, u)) * a)

    def kl_cov(row: int, t: int) -> float:
        penalty = 0.5 * abs(x(row, t)) if selected[row, t] else 0.0
        return -clipped_exp(x(row, t)) * case.advantages[row, t] + penalty

    t = {**case.tensors(skips="behaviour"), "selected_BR": torch.from_numpy(selected)}
    current_BR = t.pop("current_BR")

    actual = policy_losses.clip_cov(current_BR, **t, clip_high=0.28)
    assert_equals(actual, loop(case, clip_cov))
    actual = policy_losses.kl_cov(current_BR, **t, coefficient=0.5)
    assert_equals(actual, loop(case, kl_cov), atol=1e-12)


@given(cases())
def test_covariances_equal_the_loop(case: Case) -> None:
    def covariance(row: int, t: int) -> float:
        return (case.current[row, t] + 2.0) * (case.advantages[row, t] - 0.25)

    actual = policy_losses.covariances(
        torch.from_numpy(case.current).requires_grad_(),
        advantages_BR=torch.from_numpy(case.advantages),
        mask_BR=torch.from_numpy(case.mask),
        mean_logprob=-2.0,
        mean_advantage=0.25,
    )

    assert not actual.requires_grad
    assert_equals(actual, loop(case, covariance))


@given(cases())
def test_value_loss_equals_the_loop(case: Case) -> None:
    def token_loss(row: int, t: int) -> float:
        value, old, target = (a[row, t] for a in (case.current, case.old, case.advantages))
        clipped = old + max(-0.5, min(0.5, value - old))
        return max((value - target) ** 2, (clipped - target) ** 2) / 2

    actual = losses.clipped_value_loss(
        torch.from_numpy(case.current),
        old_BR=torch.from_numpy(case.old),
        returns_BR=torch.from_numpy(case.advantages),
        mask_BR=torch.from_numpy(case.mask),
        clip=0.5,
    )

    np.testing.assert_allclose(actual.numpy(), loop(case, token_loss), rtol=1e-10, atol=1e-12)


def _selected(t: dict[str, Any]) -> dict[str, Any]:
    """Every second column."""
    columns = torch.arange(t["mask_BR"].shape[1]).expand(t["mask_BR"].shape)
    return {**t, "selected_BR": columns % 2 == 0}


LOSSES: dict[str, Callable[..., Tensor]] = {
    "dppo": lambda c, *, old_BR, **t: policy_losses.dppo(c, behaviour_BR=old_BR, **t),
    "dppo kl": lambda c, *, old_BR, **t: policy_losses.dppo(
        c, behaviour_BR=old_BR, divergence="kl", **t
    ),
    "sapo": policy_losses.sapo,
    "gmpo": policy_losses.gmpo,
    "clip_cov": lambda c, **t: policy_losses.clip_cov(c, **_selected(t)),
    "kl_cov": lambda c, **t: policy_losses.kl_cov(c, **_selected(t)),
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


@pytest.mark.parametrize("name", sorted(LOSSES))
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


def test_sapo_has_the_gradient_of_the_policy_gradient_on_policy() -> None:
    current_BR = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    advantages_BR = torch.tensor([[0.7, -1.5]], dtype=torch.float64)

    policy_losses.sapo(
        current_BR,
        old_BR=current_BR.detach(),
        advantages_BR=advantages_BR,
        mask_BR=torch.ones(1, 2),
    ).sum().backward()

    torch.testing.assert_close(current_BR.grad, -advantages_BR)


def test_dppo_keeps_rare_tokens_that_ppo_clips() -> None:
    # From 0.001 to 0.01 the ratio is 10, and the policies differ by 0.009. From 0.6 to 0.8 the
    # ratio is 1.33, and they differ by 0.2.
    behaviour_BR = torch.tensor([[0.001, 0.6]]).log()
    current_BR = torch.tensor([[0.01, 0.8]]).log()

    is_masked_BR = policy_losses.dppo_masked(
        current_BR,
        behaviour_BR=behaviour_BR,
        advantages_BR=torch.ones(1, 2),
        mask_BR=torch.ones(1, 2),
    )

    assert is_masked_BR.tolist() == [[False, True]]


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


# Ratios exp(current - old): 1.2214, 7.3891, 1, 0.3679.
CURRENT = torch.tensor([[-1.0, -2.0, -0.5, -3.0]], dtype=torch.float64)
OLD = torch.tensor([[-1.2, -4.0, -0.5, -2.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "advantage", "expected"),
    [
        # Probabilities move by 0.0667, 0.1170, 0 and -0.0855: none by more than 0.15.
        ("dppo", 1.0, [-1.2214, -7.3891, -1.0, -0.3679]),
        # KL divergences of the two-way choice: 0.0107, 0.0579, 0 and 0.0482.
        ("dppo kl", 1.0, [-1.2214, 0.0, -1.0, -0.3679]),
        ("sapo", 1.0, [-2.2205, -3.9933, -2.0, -1.3881]),
        ("sapo", -1.0, [2.1252, 3.8049, 1.9048, 1.2949]),
        # Log-ratios 0.2, 0.4 for 2, 0 and -1: their mean is -0.1.
        ("gmpo", 1.0, [-0.9048] * 4),
        # Log-ratios 0.2, 2, 0 and -0.4 for -1: their mean is 0.45.
        ("gmpo", -1.0, [1.5683] * 4),
        ("clip_cov", 1.0, [0.0, -1.2, 0.0, -0.3679]),
        ("kl_cov", 1.0, [-1.0214, -7.3891, -1.0, -0.3679]),
        ("cross_entropy", 1.0, [1.0, 2.0, 0.5, 3.0]),
        ("entropy_bonus", 1.0, [0.1, 0.2, 0.05, 0.3]),
        # The return is 1. The values are clipped to -1, -3.8, -0.5 and -2.2.
        ("clipped_value_loss", 1.0, [2.0, 11.52, 1.125, 8.0]),
    ],
)
def test_loss_matches_the_golden_vector(name: str, advantage: float, expected: list[float]) -> None:
    loss_BR = LOSSES[name](
        CURRENT,
        old_BR=OLD,
        advantages_BR=torch.full((1, 4), advantage, dtype=torch.float64),
        mask_BR=torch.ones(1, 4, dtype=torch.bool),
    )

    assert [round(value, 4) for value in loss_BR[0].tolist()] == expected
