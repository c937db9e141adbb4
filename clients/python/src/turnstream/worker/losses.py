"""Policy losses per token, and their exact average over ranks and micro-batches.

Every function takes tensors of shape (B, R): B rows, R response positions, right-aligned as in
`LeftPaddedTensors`, or of the shape of any other layout. Where `mask_BR` is 0 nothing is read, and
value and gradient are exactly 0. Log-probabilities are natural, of the sampled token:

    behaviour   under the policy that sampled the token: the generator's numbers
    old         under the weights at the start of the step: the trainer's numbers
    current     under the weights in training; the only one with a gradient

A run that does not recompute passes `behaviour` for `old`. Exponents are clipped to +-20, so that
one extreme token makes a large number and not an infinity.

    loss_BR = ppo_clip(current_BR, old_BR=old_BR, advantages_BR=part.advantages_BR, mask_BR=mask_BR)
    loss = aggregate(loss_BR * weights_BR, part)
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnstream.batching.scoring.denominators import require_denominator
from turnstream.errors import BatchingError, InvalidConfigError
from turnstream.types import Aggregation, Denominators
from turnstream.worker.tensors import RowTensors, row_sums

MAX_EXPONENT = 20.0
"""exp(20) is 4.9e8: still finite when squared in float32, and far above every clip in use."""

_MIN_LOGPROB = -1e4
"""A token that a sampler excludes has a log-probability of -inf. 0 times -inf is NaN, not 0."""


def response_logprobs(
    logits_BTV: Tensor, *, input_ids_BT: Tensor, response_width: int, temperature: float = 1.0
) -> Tensor:
    """Return the log-probability of every response token, float32 (B, R).

    Responses end in the last column, and the logits at t score token t + 1. So the columns
    `[-R - 1 : -1]` score them. The last R + 1 columns of the logits may be passed alone.

    Raises:
        BatchingError: the widest row is all response: nothing scores its first token.
    """
    if logits_BTV.shape[1] <= response_width:
        raise BatchingError(
            f"logits of {logits_BTV.shape[1]} columns do not score a response of {response_width} "
            "tokens: one column before the response is needed (is a prompt empty?)"
        )
    first = logits_BTV.shape[1] - response_width - 1
    tokens_BR = input_ids_BT[:, input_ids_BT.shape[1] - response_width :]
    return token_logprobs(logits_BTV[:, first:-1], tokens=tokens_BR, temperature=temperature)


def next_token_logprobs(logits: Tensor, *, input_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log-probabilities, float32 like `input_ids`: slot j scores the token in slot j + 1.

    The last slot of a row scores the first token of the next one; the loss mask is 0 there.
    `logits` are (B, T, V) of right-padded rows, or (N, V) of packed ones.
    """
    return token_logprobs(logits, tokens=input_ids.roll(-1, dims=-1), temperature=temperature)


def token_logprobs(logits: Tensor, *, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log-probability of each token under its own logits (..., V), float32 (...).

    `temperature` is that of sampling.
    """
    scores = logits.float()
    if temperature != 1.0:
        scores = scores / temperature
    return scores.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - scores.logsumexp(-1)


def token_entropies(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return the entropy of the distribution of each logits (..., V), in nats: float32 (...)."""
    logprobs = (logits.float() / temperature).log_softmax(-1)
    return -(logprobs.exp() * logprobs.clamp(min=_MIN_LOGPROB)).sum(-1)


def log_ratio(numerator_BR: Tensor, denominator_BR: Tensor, *, mask_BR: Tensor) -> Tensor:
    """Return `numerator - denominator` where the mask is set, 0 elsewhere (also for NaN)."""
    return masked(numerator_BR - denominator_BR, mask_BR=mask_BR)


def clipped_exp(exponent: Tensor) -> Tensor:
    """Return the exponential of the exponent, clipped to +-20."""
    return exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()


def sum_over_row(values_BR: Tensor, *, row_of: Tensor | None) -> Tensor:
    """Return the sum of every row's values, (B, 1), or (N,) where tensors are flat.

    Flat tensors without `row_of` are a BatchingError.
    """
    if row_of is not None:
        # A flat share may have more rows than values. So a row is identified by the position of its
        # first value among all values sorted by row: below N, and without a transfer from the
        # device.
        places_N = torch.searchsorted(row_of.sort().values, row_of)
        return row_sums(values_BR, rows=places_N, num_rows=len(values_BR))[places_N]
    if values_BR.dim() < 2:
        raise BatchingError(
            f"tensors of shape {tuple(values_BR.shape)} do not say which token is of which row: "
            "row_of=part.row_of does"
        )
    return values_BR.sum(dim=1, keepdim=True)


def mean_over_row(values_BR: Tensor, *, mask_BR: Tensor, row_of: Tensor | None = None) -> Tensor:
    """Return the mean of every row's masked values, shaped as by `sum_over_row`; 0 for none.

    `values_BR` is 0 outside the mask, as `log_ratio` returns it.
    """
    num_tokens_B1 = sum_over_row(mask_BR.long(), row_of=row_of)
    return sum_over_row(values_BR, row_of=row_of) / num_tokens_B1.clamp(min=1)


def ppo_clip(
    current_BR: Tensor,
    *,
    old_BR: Tensor,
    advantages_BR: Tensor,
    mask_BR: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """Return -min(u * A, clip(u) * A) with u = exp(current - old), (B, R).

    PPO (arXiv:1707.06347, eq. 7). The ratio is clipped to [1 - clip_low, 1 + clip_high]; "clip
    higher" (DAPO) is a higher `clip_high`. `dual_clip` bounds the loss by -dual_clip * A where
    A < 0 (arXiv:1912.09729; 3 is usual): an extreme ratio of a bad outcome has no gradient.
    """
    ratio_BR = clipped_exp(log_ratio(current_BR, old_BR, mask_BR=mask_BR))
    advantages_BR = masked(advantages_BR, mask_BR=mask_BR)
    loss_BR = _clipped_loss(ratio_BR, advantages_BR, clip_low=clip_low, clip_high=clip_high)
    if dual_clip is not None:
        bounded_BR = torch.minimum(loss_BR, -dual_clip * advantages_BR)
        loss_BR = torch.where(advantages_BR < 0, bounded_BR, loss_BR)
    return masked(loss_BR, mask_BR=mask_BR)


def gspo(
    current_BR: Tensor,
    *,
    old_BR: Tensor,
    advantages_BR: Tensor,
    mask_BR: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    row_of: Tensor | None = None,
) -> Tensor:
    """Return the clipped loss, (B, R), with one ratio per row: exp(mean of current - old).

    GSPO (arXiv:2507.18071). Packed and jagged tensors need `row_of=part.row_of`.
    """
    exponent_BR = log_ratio(current_BR, old_BR, mask_BR=mask_BR)
    ratio_B1 = clipped_exp(mean_over_row(exponent_BR, mask_BR=mask_BR, row_of=row_of))
    advantages_BR = masked(advantages_BR, mask_BR=mask_BR)
    loss_BR = _clipped_loss(ratio_B1, advantages_BR, clip_low=clip_low, clip_high=clip_high)
    return masked(loss_BR, mask_BR=mask_BR)


def cispo(
    current_BR: Tensor,
    *,
    old_BR: Tensor,
    advantages_BR: Tensor,
    mask_BR: Tensor,
    clip_low: float = 1.0,
    clip_high: float = 0.28,
) -> Tensor:
    """Return -stop_gradient(clip(u)) * A * current, (B, R): a clipped weight drops no token.

    CISPO (MiniMax-M1, arXiv:2506.13585); `clip_low` 1 leaves the ratio unbounded below.
    """
    ratio_BR = clipped_exp(log_ratio(current_BR, old_BR, mask_BR=mask_BR)).detach()
    weight_BR = ratio_BR.clamp(1.0 - clip_low, 1.0 + clip_high)
    weighted_BR = weight_BR * masked(advantages_BR, mask_BR=mask_BR)
    return -weighted_BR * masked(current_BR, mask_BR=mask_BR)


def decoupled_ppo(
    current_BR: Tensor,
    *,
    old_BR: Tensor,
    behaviour_BR: Tensor,
    advantages_BR: Tensor,
    mask_BR: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    behaviour_cap: float = 5.0,
) -> Tensor:
    """Return `ppo_clip` weighted by w = exp(old - behaviour), (B, R); 0 if w > `behaviour_cap`.

    Decoupled PPO (arXiv:2110.00641; AReaL, arXiv:2505.24298). The weight has no gradient.
    """
    loss_BR = ppo_clip(
        current_BR,
        old_BR=old_BR,
        advantages_BR=advantages_BR,
        mask_BR=mask_BR,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    weight_BR = clipped_exp(log_ratio(old_BR, behaviour_BR, mask_BR=mask_BR)).detach()
    return loss_BR * torch.where(weight_BR > behaviour_cap, 0.0, weight_BR)


def cross_entropy(current_BR: Tensor, *, mask_BR: Tensor) -> Tensor:
    """Return -current, (B, R): supervised training. `aggregate` multiplies by token weights."""
    return -masked(current_BR, mask_BR=mask_BR)


def entropy_bonus(entropies_BR: Tensor, *, mask_BR: Tensor, coefficient: float) -> Tensor:
    """Return -coefficient * entropy, (B, R): added to a loss, it rewards a policy that explores.

    `entropies_BR` are in nats with a gradient, as `token_entropies` returns them.
    """
    return -coefficient * masked(entropies_BR, mask_BR=mask_BR)


def clipped_value_loss(
    values_BR: Tensor,
    *,
    old_BR: Tensor,
    returns_BR: Tensor,
    mask_BR: Tensor,
    clip: float | None = 0.2,
) -> Tensor:
    """Return max((v - r)^2, (c - r)^2) / 2, (B, R); c is the value clipped to old +- `clip`.

    The value loss of PPO2 (https://github.com/openai/baselines). `old_BR` are the values at the
    start of the step. Values and returns are in units of reward. Without `clip`, the loss is
    (v - r)^2 / 2.
    """
    error_BR = masked(values_BR - returns_BR, mask_BR=mask_BR)
    if clip is None:
        return error_BR.square() / 2
    moved_BR = masked(values_BR - old_BR, mask_BR=mask_BR)
    clipped_BR = error_BR - moved_BR + moved_BR.clamp(-clip, clip)
    return torch.maximum(error_BR.square(), clipped_BR.square()) / 2


def _clipped_loss(
    ratio: Tensor, advantages_BR: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(-ratio * advantages_BR, -clipped * advantages_BR)


def masked(values_BR: Tensor, *, mask_BR: Tensor) -> Tensor:
    """Return the values where the mask is set, 0 elsewhere. A product would keep NaN."""
    return torch.where(mask_BR.bool(), values_BR, 0.0)


# KL to a reference policy, per token (http://joschu.net/blog/kl-approx.html)


def kl_k1(current_BR: Tensor, *, reference_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """Return x = current - reference, (B, R): unbiased, of high variance, sometimes negative."""
    return log_ratio(current_BR, reference_BR, mask_BR=mask_BR)


def kl_k2(current_BR: Tensor, *, reference_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """Return x * x / 2, (B, R): its gradient is the unbiased one of the KL."""
    return log_ratio(current_BR, reference_BR, mask_BR=mask_BR).square() / 2


def kl_k3(current_BR: Tensor, *, reference_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """Return exp(-x) - 1 + x, (B, R): unbiased, of low variance, never negative."""
    exponent_BR = log_ratio(current_BR, reference_BR, mask_BR=mask_BR)
    return clipped_exp(-exponent_BR) - 1.0 + exponent_BR


def aggregate(
    loss_BR: Tensor,
    part: RowTensors,
    *,
    mode: Aggregation | None = None,
    denominators: Denominators | None = None,
    averaged_over: int = 1,
) -> Tensor:
    """Return this micro-batch's part of the mini-batch's loss: local sum / global denominator.

    The sum of the parts, and of their gradients, over micro-batches and ranks is the loss of the
    whole mini-batch, independent of its cuts, padding and order. A correction that sets weights to
    0 keeps the shipped denominators: fewer tokens make a smaller step. Inert rows and masked
    positions contribute exactly 0. A micro-batch with nothing else has a differentiable loss of 0,
    so that every rank takes part in the collectives.

    Args:
        loss_BR: token losses, in the shape of the layout's own loss mask. They are multiplied by
            the rows' token weights here, and summed in float32 or wider.
        part: the rows of the losses, in any layout.
        mode: the average; None takes the run's `aggregation`, as shipped with the batch.
        denominators: numbers of the whole mini-batch; None takes those shipped with it.
        averaged_over: divisor of the framework: the number of ranks if it averages gradients (DDP,
            FSDP), times the accumulation steps if it divides by them (DeepSpeed), 1 if it sums.

    Raises:
        BatchingError: `loss_BR` has another shape than the rows: broadcasting would hide it.
        InvalidConfigError: the run ships no denominator for this mode, or `mode` is missing and the
            batch of an older release does not name it.
    """
    mode = mode or part.aggregation
    if mode is None:
        raise InvalidConfigError(
            "mode",
            "it is missing, and the batch, of an older release, does not name the aggregation of "
            "its run: pass mode=batches.config.aggregation",
        )
    if denominators is None:
        denominators = part.denominators
    require_denominator(denominators, aggregation=mode)
    mask_BR = part.trained_tokens
    if loss_BR.shape != mask_BR.shape:
        raise BatchingError(
            f"losses of shape {tuple(loss_BR.shape)} for rows of shape {tuple(mask_BR.shape)}"
        )
    loss_BR = masked(loss_BR, mask_BR=mask_BR)
    loss_BR = loss_BR.to(torch.promote_types(loss_BR.dtype, torch.float32))
    weights_BR = part.token_weights
    if weights_BR is not None:
        loss_BR = loss_BR * masked(weights_BR, mask_BR=mask_BR)
    row_sums_B = part.row_sums(loss_BR)
    row_sums_B = torch.where(part.is_padding_B, 0.0, row_sums_B)
    per_row_B, denominator = _row_divisors(part, mode=mode, denominators=denominators)
    numerator = (part.weight_B * row_sums_B / per_row_B).sum()
    return numerator * (averaged_over / denominator)


def _row_divisors(
    part: RowTensors, *, mode: Aggregation, denominators: Denominators
) -> tuple[Tensor, float]:
    """Return the divisor of every row's sum (B,), and of their total; none is 0.

    The number of rows is the sum of their weights: the same where all weights are 1.
    """
    per_row_B = torch.ones_like(part.weight_B)
    denominator = denominators.weight_sum
    match mode:
        case "token_mean":
            denominator = denominators.num_tokens
        case "seq_mean_token_sum":
            pass
        case "seq_mean_token_mean":
            per_row_B = part.row_sums(part.trained_tokens.long())
        case "constant":
            denominator *= denominators.length_constant
        case "rollout_mean":
            per_row_B = part.trajectory_num_tokens_B
            denominator = denominators.num_trajectories
        case "prompt_mean":
            per_row_B, denominator = part.group_num_tokens_B, denominators.num_groups
    return per_row_B.clamp(min=1), denominator or 1
