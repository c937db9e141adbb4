"""Guards of the policy losses beyond the clipped ratio."""

from __future__ import annotations

from mutations.mutation import Mutation


def _mutation(name: str, before: str, after: str, *, path: str = "policy_losses.py") -> Mutation:
    return Mutation(name, path, before, after, ("test_policy_losses",), package="worker")


POLICY_LOSSES = (
    _mutation(
        "DPPO masks tokens that return to the behaviour policy",
        "return is_away_BR & (distance_BR > limit)",
        "return distance_BR > limit",
    ),
    _mutation(
        "the mask of DPPO has no effect",
        "kept_BR = mask_BR.bool() & ~is_masked_BR",
        "kept_BR = mask_BR.bool()",
    ),
    _mutation(
        "a probability above 1 makes the divergence not a number",
        "    to_BR = to_BR.clamp(max=0.0)\n",
        "",
    ),
    _mutation(
        "a certain token makes the divergence not a number",
        "p_BR.clamp(max=_MAX_PROBABILITY), q_BR.clamp(max=_MAX_PROBABILITY)",
        "p_BR, q_BR",
    ),
    _mutation(
        "SAPO has one temperature",
        "temperature_BR.masked_fill(advantages_BR > 0, temperature_positive)",
        "temperature_BR",
    ),
    _mutation(
        "the gradient of SAPO is scaled by its temperature",
        ".sigmoid() * (4.0 / temperature_BR)",
        ".sigmoid() * 4.0",
    ),
    _mutation(
        "GMPO clips both sides",
        "exponent_BR.clamp(min=-clip_low), exponent_BR.clamp(max=clip_high)",
        "exponent_BR.clamp(-clip_low, clip_high), exponent_BR.clamp(-clip_low, clip_high)",
    ),
    _mutation(
        "Clip-Cov trains the selected tokens",
        "return masked(loss_BR, mask_BR=~selected_BR)",
        "return loss_BR",
    ),
    _mutation(
        "KL-Cov penalizes every token",
        "masked(exponent_BR.abs(), mask_BR=selected_BR)",
        "exponent_BR.abs()",
    ),
    _mutation(
        "the KL of KL-Cov may be negative",
        "masked(exponent_BR.abs(), mask_BR",
        "masked(exponent_BR, mask_BR",
    ),
    _mutation(
        "covariances have a gradient",
        "current_BR.detach().double() - mean_logprob",
        "current_BR.double() - mean_logprob",
    ),
    _mutation(
        "the value loss takes the smaller error",
        "torch.maximum(error_BR.square(), clipped_BR.square()) / 2",
        "torch.minimum(error_BR.square(), clipped_BR.square()) / 2",
        path="losses.py",
    ),
    _mutation(
        "the entropy of a policy with an excluded token is not a number",
        "logprobs.clamp(min=_MIN_LOGPROB)",
        "logprobs",
        path="losses.py",
    ),
    _mutation(
        "the entropy forgets the temperature",
        "(logits.float() / temperature).log_softmax(-1)",
        "logits.float().log_softmax(-1)",
        path="losses.py",
    ),
    _mutation(
        "the entropy bonus punishes entropy",
        "return -coefficient * masked(",
        "return coefficient * masked(",
        path="losses.py",
    ),
)
