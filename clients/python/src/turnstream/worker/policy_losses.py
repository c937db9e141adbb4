"""Policy losses per token that replace the clipped ratio of PPO.

Arguments, shapes and masks are those of `turnstream.worker.losses`. Value and gradient are exactly
0 where `mask_BR` is 0, and `aggregate` averages the result.

`clip_cov` and `kl_cov` treat a few tokens of a mini-batch in another way. The caller passes these
tokens as `selected_BR`, because they depend on all micro-batches and ranks. `covariances` has the
quantity that the selection compares.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from turnstream.worker.losses import clipped_exp, log_ratio, masked, mean_over_row, ppo_clip

Divergence = Literal["tv", "kl"]
"""Total variation or KL divergence between two policies, of "the sampled token or another one"."""

_THRESHOLDS: dict[Divergence, float] = {"tv": 0.15, "kl": 0.05}
_MAX_PROBABILITY = 1.0 - 1e-7
"""The divergence has a logarithm of 1 - probability."""


def dppo(
    current_BR: Tensor,
    *,
    behaviour_BR: Tensor,
    advantages_BR: Tensor,
    mask_BR: Tensor,
    divergence: Divergence = "tv",
    threshold: float | None = None,
) -> Tensor:
    """Return -u * A with u = exp(current - behaviour), (B, R); 0 where `dppo_masked` is set.

    Divergence PPO (arXiv:2602.04879): a token is masked for the divergence of the policies and not
    for its ratio, which is extreme for rare tokens.
    """
    is_masked_BR = dppo_masked(
        current_BR,
        behaviour_BR=behaviour_BR,
        advantages_BR=advantages_BR,
        mask_BR=mask_BR,
        divergence=divergence,
        threshold=threshold,
    )
    kept_BR = mask_BR.bool() & ~is_masked_BR
    ratio_BR = clipped_exp(log_ratio(current_BR, behaviour_BR, mask_BR=kept_BR))
    return masked(-ratio_BR * masked(advantages_BR, mask_BR=kept_BR), mask_BR=kept_BR)


def dppo_masked(
    current_BR: Tensor,
    *,
    behaviour_BR: Tensor,
    advantages_BR: Tensor,
    mask_BR: Tensor,
    divergence: Divergence = "tv",
    threshold: float | None = None,
) -> Tensor:
    """Return the tokens that would move further from the behaviour policy, bool (B, R).

    A token is set if the divergence is above `threshold` and the advantage increases it: A > 0 and
    current > behaviour, or A < 0 and current < behaviour. By default the threshold is 0.15 for
    "tv" and 0.05 for "kl".

    The divergence is |p - q|, or p log(p / q) + (1 - p) log((1 - p) / (1 - q)). Here p is the
    probability of the sampled token under the behaviour policy, and q under the current one.
    """
    moved_BR = log_ratio(current_BR, behaviour_BR, mask_BR=mask_BR).detach()
    behaviour_BR = masked(behaviour_BR, mask_BR=mask_BR)
    distance_BR = _binary_divergence(behaviour_BR, behaviour_BR + moved_BR, kind=divergence)
    limit = _THRESHOLDS[divergence] if threshold is None else threshold
    is_away_BR = masked(advantages_BR, mask_BR=mask_BR) * moved_BR > 0
    return is_away_BR & (distance_BR > limit)


def sapo(
    current_BR: Tensor,
    *,
    old_BR: Tensor,
    advantages_BR: Tensor,
    mask_BR: Tensor,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> Tensor:
    """Return -(4 / t) * sigmoid(t * (u - 1)) * A with u = exp(current - old), (B, R).

    Soft adaptive policy optimization (arXiv:2511.20347). At u = 1 the gradient is that of PPO, and
    it fades with the distance from 1. The temperature t is `temperature_positive` where A > 0, else
    `temperature_negative`.
    """
    ratio_BR = clipped_exp(log_ratio(current_BR, old_BR, mask_BR=mask_BR))
    advantages_BR = masked(advantages_BR, mask_BR=mask_BR)
    temperature_BR = torch.full_like(advantages_BR, temperature_negative)
    temperature_BR = temperature_BR.masked_fill(advantages_BR > 0, temperature_positive)
    gate_BR = (temperature_BR * (ratio_BR - 1.0)).sigmoid() * (4.0 / temperature_BR)
    return masked(-gate_BR * advantages_BR, mask_BR=mask_BR)


def gmpo(
    current_BR: Tensor,
    *,
    old_BR: Tensor,
    advantages_BR: Tensor,
    mask_BR: Tensor,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
    row_of: Tensor | None = None,
) -> Tensor:
    """Return -s * A, (B, R), with one s per row: the geometric mean of the clipped ratios.

    Geometric-mean policy optimization (arXiv:2507.20673). A log-ratio x = current - old is clipped
    to [-clip_low, clip_high]: where A < 0 only from below, elsewhere only from above. Packed and
    jagged tensors need `row_of=part.row_of`.
    """
    exponent_BR = log_ratio(current_BR, old_BR, mask_BR=mask_BR)
    advantages_BR = masked(advantages_BR, mask_BR=mask_BR)
    held_BR = torch.where(
        advantages_BR < 0, exponent_BR.clamp(min=-clip_low), exponent_BR.clamp(max=clip_high)
    )
    ratio_B1 = clipped_exp(mean_over_row(held_BR, mask_BR=mask_BR, row_of=row_of))
    return masked(-ratio_B1 * advantages_BR, mask_BR=mask_BR)


def covariances(
    current_BR: Tensor,
    *,
    advantages_BR: Tensor,
    mask_BR: Tensor,
    mean_logprob: float,
    mean_advantage: float,
) -> Tensor:
    """Return (current - mean) * (A - mean), float64 (B, R), without gradient; 0 where masked.

    A token's part of the covariance that lowers the entropy (arXiv:2505.22617, section 4). The
    caller averages over all trained tokens of the mini-batch: all micro-batches and ranks.
    """
    logprobs_BR = masked(current_BR.detach().double() - mean_logprob, mask_BR=mask_BR)
    return logprobs_BR * masked(advantages_BR.double() - mean_advantage, mask_BR=mask_BR)


def clip_cov(
    current_BR: Tensor,
    *,
    old_BR: Tensor,
    advantages_BR: Tensor,
    mask_BR: Tensor,
    selected_BR: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """Return `ppo_clip`, (B, R); value and gradient are 0 where `selected_BR` is set.

    Clip-Cov (arXiv:2505.22617). The paper selects a share of 0.0002 of the trained tokens, at
    random among those with `covariances` between 1 and 5 that the ratio does not clip.
    """
    loss_BR = ppo_clip(
        current_BR,
        old_BR=old_BR,
        advantages_BR=advantages_BR,
        mask_BR=mask_BR,
        clip_low=clip_low,
        clip_high=clip_high,
    )
    return masked(loss_BR, mask_BR=~selected_BR)


def kl_cov(
    current_BR: Tensor,
    *,
    old_BR: Tensor,
    advantages_BR: Tensor,
    mask_BR: Tensor,
    selected_BR: Tensor,
    coefficient: float = 1.0,
) -> Tensor:
    """Return -u * A, (B, R), plus coefficient * |current - old| where `selected_BR` is set.

    KL-Cov (arXiv:2505.22617), with u = exp(current - old). The paper selects the share of 0.0002 to
    0.002 of the trained tokens that has the largest `covariances`.
    """
    exponent_BR = log_ratio(current_BR, old_BR, mask_BR=mask_BR)
    loss_BR = -clipped_exp(exponent_BR) * masked(advantages_BR, mask_BR=mask_BR)
    return loss_BR + coefficient * masked(exponent_BR.abs(), mask_BR=selected_BR)


def _binary_divergence(from_BR: Tensor, to_BR: Tensor, *, kind: Divergence) -> Tensor:
    to_BR = to_BR.clamp(max=0.0)
    p_BR, q_BR = from_BR.exp(), to_BR.exp()
    if kind == "tv":
        return (p_BR - q_BR).abs()
    p_BR, q_BR = p_BR.clamp(max=_MAX_PROBABILITY), q_BR.clamp(max=_MAX_PROBABILITY)
    others_BR = (1.0 - p_BR) * ((1.0 - p_BR).log() - (1.0 - q_BR).log())
    return p_BR * (from_BR - to_BR) + others_BR
