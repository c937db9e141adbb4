"""Every policy loss against a loop over rows and tokens; gradients that stay finite."""

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
from turnstream.errors import BatchingError
from turnstream.worker import losses


def ratio(case: Case, row: int, t: int) -> float:
    return clipped_exp(case.current[row, t] - case.old[row, t])


def loop(case: Case, token_loss: Callable[[int, int], float]) -> np.ndarray:
    """`token_loss(row, t)` where trained, 0 elsewhere."""
    loss = np.zeros(case.mask.shape)
    for row, t in zip(*np.nonzero(case.mask), strict=True):
        loss[row, t] = token_loss(row, t)
    return loss


def clipped(u: float, low: float, high: float) -> float:
    return max(1 - low, min(1 + high, u))


def assert_equals(actual: Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=1e-12, atol=1e-300)


@given(cases(), st.sampled_from([None, 3.0]))
def test_ppo_clip_equals_the_loop(case: Case, dual_clip: float | None) -> None:
    def token_loss(row: int, t: int) -> float:
        u, a = ratio(case, row, t), case.advantages[row, t]
        loss = -min(u * a, clipped(u, 0.2, 0.28) * a)
        return min(loss, -dual_clip * a) if dual_clip and a < 0 else loss

    t = case.tensors(skips="behaviour")
    actual = losses.ppo_clip(
        t.pop("current_BR"), **t, clip_low=0.2, clip_high=0.28, dual_clip=dual_clip
    )

    assert_equals(actual, loop(case, token_loss))


@given(cases())
def test_gspo_equals_the_loop(case: Case) -> None:
    def token_loss(row: int, t: int) -> float:
        live = case.mask[row]
        gaps = case.current[row][live] - case.old[row][live]
        s, a = clipped_exp(gaps.sum() / live.sum()), case.advantages[row, t]
        return -min(s * a, clipped(s, 3e-4, 4e-4) * a)

    t = case.tensors(skips="behaviour")
    actual = losses.gspo(t.pop("current_BR"), **t)

    assert_equals(actual, loop(case, token_loss))


@given(cases())
def test_cispo_equals_the_loop(case: Case) -> None:
    def weight(row: int, t: int) -> float:
        u = ratio(case, row, t)
        return -clipped(u, 0.9, 0.28) * case.advantages[row, t]

    t = case.tensors(skips="behaviour")
    current_BR = t.pop("current_BR").requires_grad_()
    actual = losses.cispo(current_BR, **t, clip_low=0.9, clip_high=0.28)
    actual.sum().backward()

    assert_equals(actual, loop(case, lambda row, t: weight(row, t) * case.current[row, t]))
    assert current_BR.grad is not None
    assert_equals(current_BR.grad, loop(case, weight))


@given(cases())
def test_decoupled_ppo_equals_the_loop(case: Case) -> None:
    def token_loss(row: int, t: int) -> float:
        u, a = ratio(case, row, t), case.advantages[row, t]
        w = clipped_exp(case.old[row, t] - case.behaviour[row, t])
        return 0.0 if w > 5.0 else -min(u * a, clipped(u, 0.2, 0.2) * a) * w

    t = case.tensors()
    actual = losses.decoupled_ppo(t.pop("current_BR"), **t, behaviour_cap=5.0)

    assert_equals(actual, loop(case, token_loss))


@given(cases())
def test_kl_estimates_equal_the_loops(case: Case) -> None:
    def x(row: int, t: int) -> float:
        return case.current[row, t] - case.old[row, t]

    t = case.tensors()
    arguments = {"reference_BR": t["old_BR"], "mask_BR": t["mask_BR"]}

    assert_equals(losses.kl_k1(t["current_BR"], **arguments), loop(case, x))
    assert_equals(
        losses.kl_k2(t["current_BR"], **arguments), loop(case, lambda r, t: x(r, t) ** 2 / 2)
    )
    np.testing.assert_allclose(
        losses.kl_k3(t["current_BR"], **arguments).numpy(),
        loop(case, lambda r, t: clipped_exp(-x(r, t)) - 1 + x(r, t)),
        rtol=1e-12,
        atol=1e-14,  # exp(-x) - 1 + x loses digits near 0, in both
    )


def kl_to_old(estimate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda current, *, old_BR, mask_BR, **_: estimate(
        current, reference_BR=old_BR, mask_BR=mask_BR
    )


LOSSES: dict[str, Callable[..., Tensor]] = {
    "ppo_clip": losses.ppo_clip,
    "dual_clip": lambda current, **t: losses.ppo_clip(current, dual_clip=3.0, **t),
    "gspo": losses.gspo,
    "cispo": losses.cispo,
    "kl_k2": kl_to_old(losses.kl_k2),
    "kl_k3": kl_to_old(losses.kl_k3),
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


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "kl_k2", "kl_k3"])
def test_gradients_match_finite_differences(name: str) -> None:
    rng = np.random.default_rng(7)
    old_BR = torch.from_numpy(-rng.exponential(1.0, (3, 5)))
    current_BR = (old_BR + torch.from_numpy(rng.normal(0, 0.05, (3, 5)))).requires_grad_()
    mask_BR = torch.from_numpy(rng.random((3, 5)) < 0.7)
    t = {
        "old_BR": old_BR,
        "advantages_BR": torch.from_numpy(rng.normal(0, 1, (3, 5))),
        "mask_BR": mask_BR,
    }

    assert torch.autograd.gradcheck(lambda c: LOSSES[name](c, **t), (current_BR,), eps=1e-7)


def test_dual_clip_removes_the_gradient_of_bad_extreme_tokens() -> None:
    current_BR = torch.tensor([[0.0, -1.0]], requires_grad=True)
    t: Any = {
        "old_BR": torch.tensor([[-9.0, -1.0]]),
        "advantages_BR": torch.tensor([[-1.0, -1.0]]),
        "mask_BR": torch.ones(1, 2),
    }

    loss_BR = losses.ppo_clip(current_BR, **t, dual_clip=3.0)
    loss_BR.sum().backward()

    assert loss_BR.tolist() == [[3.0, 1.0]]
    assert current_BR.grad is not None
    assert current_BR.grad.tolist() == [[0.0, 1.0]]


def test_weight_of_decoupled_ppo_has_no_gradient() -> None:
    old_BR = torch.tensor([[-1.0]], requires_grad=True)
    t: Any = {
        "behaviour_BR": torch.tensor([[-1.5]]),
        "advantages_BR": torch.ones(1, 1),
        "mask_BR": torch.ones(1, 1),
    }
    current_BR = torch.tensor([[-1.0]], requires_grad=True)

    losses.decoupled_ppo(current_BR, old_BR=old_BR.detach(), **t).sum().backward()

    assert current_BR.grad is not None
    assert current_BR.grad.item() == pytest.approx(-math.exp(0.5))


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


# Ratios exp(current - old) of the vector: 1.2214, 7.3891, 1, 0.3679; their geometric mean 1.3499.
CURRENT = torch.tensor([[-1.0, -2.0, -0.5, -3.0]], dtype=torch.float64)
PREVIOUS = torch.tensor([[-1.2, -4.0, -0.5, -2.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "advantage", "options", "expected"),
    [
        ("ppo_clip", 1.0, {}, [-1.2, -1.2, -1.0, -0.3679]),
        ("ppo_clip", -1.0, {}, [1.2214, 7.3891, 1.0, 0.8]),
        ("ppo_clip", -1.0, {"dual_clip": 3.0}, [1.2214, 3.0, 1.0, 0.8]),
        ("gspo", 1.0, {}, [-1.0004] * 4),
        ("gspo", -1.0, {}, [1.3499] * 4),
        ("cispo", 1.0, {}, [1.2214, 2.56, 0.5, 1.1036]),
        ("kl_k1", 1.0, {}, [0.2, 2.0, 0.0, -1.0]),
        ("kl_k2", 1.0, {}, [0.02, 2.0, 0.0, 0.5]),
        ("kl_k3", 1.0, {}, [0.0187, 1.1353, 0.0, 0.7183]),
        # Current and old are equal: only the weight exp(old - behaviour) is left, 0 above 5.
        ("decoupled_ppo", 1.0, {"behaviour_BR": PREVIOUS}, [-1.2214, 0, -1.0, -0.3679]),
    ],
)
def test_loss_matches_the_golden_vector(
    name: str, advantage: float, options: Any, expected: list[float]
) -> None:
    function = getattr(losses, name)
    loss_BR = (kl_to_old(function) if name.startswith("kl") else function)(
        CURRENT,
        old_BR=CURRENT if options.get("behaviour_BR") is PREVIOUS else PREVIOUS,
        advantages_BR=torch.full((1, 4), advantage, dtype=torch.float64),
        mask_BR=torch.ones(1, 4),
        **options,
    )

    assert [round(value, 4) for value in loss_BR[0].tolist()] == expected
