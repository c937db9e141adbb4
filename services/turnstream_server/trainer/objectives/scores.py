"""Numbers of one micro-batch that an objective reads, and the tokens that it selects by them.

Tensors named `_BR` have the shape of the loss mask, in any layout. Log-probabilities are natural
and of the sampled token, float32. Clip-Cov and KL-Cov select by covariance (arXiv:2505.22617). A
choice depends on the mini-batch and on `seed` alone, not on its micro-batches, layout, padding or
ranks. Random choices and equal covariances are decided by a hash of seed, row and position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnstream.worker.layouts import PackedTensors
from turnstream.worker.losses import clipped_exp, log_ratio
from turnstream.worker.policy_losses import covariances
from turnstream.worker.tensors import LeftPaddedTensors, RowTensors
from turnstream_server.trainer.objectives.parameters import ClipCov, KlCov

Gather = Callable[[Any], list[Any]]
"""Returns the values that all ranks pass, in the order of the ranks. All ranks must call it."""


def one_rank(value: Any) -> list[Any]:
    """Return the values of all ranks where there is one rank."""
    return [value]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenScores:
    """Log-probabilities of the tokens of a micro-batch; only those in the loss mask are read.

    Attributes:
        current_BR: under the weights in training, with a gradient.
        old_BR: under the weights at the start of the step, or the generator's.
        behaviour_BR: the generator's; without NaN inside the loss mask.
        reference_BR: under the reference policy; None without one.
        entropies_BR: entropy of the policy at each token in nats, with a gradient; None if the
            objective does not need it.
    """

    current_BR: Tensor
    old_BR: Tensor
    behaviour_BR: Tensor
    reference_BR: Tensor | None = None
    entropies_BR: Tensor | None = None

    def columns(self) -> Mapping[str, Tensor]:
        """Return the arguments of losses and corrections, by their names."""
        names = ("current_BR", "old_BR", "behaviour_BR")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedPart:
    """One micro-batch before its loss.

    Attributes:
        part: the rows as shipped.
        counted: rows and denominators that average the policy loss; other than `part` if the
            tokens that a correction drops are not counted.
        advantages_BR: with the KL penalty, if it is part of them.
        weights: one tensor (B, R) for each correction, in their order.
        selected_BR: bool, tokens that the loss treats in another way; None for most losses.
    """

    part: RowTensors
    counted: RowTensors
    advantages_BR: Tensor
    weights: tuple[Tensor, ...]
    selected_BR: Tensor | None = None

    @property
    def weight_BR(self) -> Tensor | None:
        """Product of the weights; None without a correction."""
        return reduce(torch.mul, self.weights) if self.weights else None


class KnownPart(NamedTuple):
    """A micro-batch, and its log-probabilities under weights that the update does not change."""

    part: LeftPaddedTensors | PackedTensors
    old_BR: Tensor | None
    reference_BR: Tensor | None


def token_scores(
    known: KnownPart, current_BR: Tensor, *, entropies_BR: Tensor | None = None
) -> tuple[TokenScores, Tensor]:
    """Return the numbers that an objective reads, and the rows without logprobs, bool (B,)."""
    fallback_BR = current_BR.detach() if known.old_BR is None else known.old_BR
    behaviour_BR, missing_B = filled_behaviour(known.part, fallback_BR)
    scores = TokenScores(
        current_BR=current_BR,
        old_BR=behaviour_BR if known.old_BR is None else known.old_BR,
        behaviour_BR=behaviour_BR,
        reference_BR=known.reference_BR,
        entropies_BR=entropies_BR,
    )
    return scores, missing_B


def lacks_logprobs(part: RowTensors) -> bool:
    """Return whether a trained token has no log-probability of the generator."""
    behaviour_BR = part.logprobs
    return behaviour_BR is None or bool((behaviour_BR.isnan() & part.trained_tokens).any())


def filled_behaviour(part: RowTensors, fallback_BR: Tensor) -> tuple[Tensor, Tensor]:
    """Return the generator's log-probabilities, (B, R), and the rows without them, bool (B,).

    One trained token without is enough. Those rows have the values of `fallback_BR`, so that their
    ratio to it is 1.
    """
    mask_BR = part.trained_tokens
    behaviour_BR = part.logprobs
    if behaviour_BR is None:
        return fallback_BR, part.row_sums(mask_BR.long()) > 0
    missing_B = part.row_sums((behaviour_BR.isnan() & mask_BR).long()) > 0
    return torch.where(part.per_token(missing_B), fallback_BR, behaviour_BR), missing_B


_DIGITS = 6
"""Covariances are rounded to this, so that rounding errors do not decide between equal ones."""


def selected_tokens(
    settings: ClipCov | KlCov,
    prepared: Sequence[PreparedPart],
    scores: Sequence[TokenScores],
    *,
    seed: int,
    gather: Gather,
) -> list[Tensor]:
    """Return the selected tokens of every micro-batch, bool (B, R).

    KL-Cov takes the largest covariances. Clip-Cov takes random tokens with a covariance in its
    range and a ratio that is not clipped. The number of tokens is `share` of all trained tokens,
    rounded down, and at least 1.
    """
    sums = np.zeros(3)
    for each, score in zip(prepared, scores, strict=True):
        mask_BR = each.part.trained_tokens
        own = (score.current_BR[mask_BR], each.advantages_BR[mask_BR])
        sums += [mask_BR.sum().item(), *(each.sum(dtype=torch.float64).item() for each in own)]
    num_tokens, logprobs, advantages = np.sum(gather(sums), axis=0).tolist()
    means = (logprobs / max(1.0, num_tokens), advantages / max(1.0, num_tokens))
    keys = [
        _keys(settings, each, score, means=means, seed=seed)
        for each, score in zip(prepared, scores, strict=True)
    ]
    num_selected = max(1, int(min(1.0, settings.share) * num_tokens))
    least = _nth_largest(keys, num_selected, gather=gather)
    return [_placed(each.part, key >= least) for each, key in zip(prepared, keys, strict=True)]


def _keys(
    settings: ClipCov | KlCov,
    prepared: PreparedPart,
    scores: TokenScores,
    *,
    means: tuple[float, float],
    seed: int,
) -> NDArray[np.complex128]:
    """Return the rank of every trained token, (N,): covariance and hash; -inf: not a candidate."""
    mask_BR = prepared.part.trained_tokens
    covariance_BR = covariances(
        scores.current_BR,
        advantages_BR=prepared.advantages_BR,
        mask_BR=mask_BR,
        mean_logprob=means[0],
        mean_advantage=means[1],
    )
    covariance = covariance_BR[mask_BR].cpu().numpy().round(_DIGITS)
    if isinstance(settings, ClipCov):
        exponent_BR = log_ratio(scores.current_BR, scores.old_BR, mask_BR=mask_BR)
        ratio = clipped_exp(exponent_BR).detach()[mask_BR].cpu().numpy()
        rises = prepared.advantages_BR[mask_BR].cpu().numpy() > 0
        is_clipped = np.where(rises, ratio > 1 + settings.clip_high, ratio < 1 - settings.clip_low)
        in_range = (covariance > settings.low) & (covariance < settings.high)
        covariance = np.where(in_range & ~is_clipped, 0.0, -np.inf)
    return (covariance + 1j * _lottery(prepared.part, seed=seed)).astype(np.complex128)


def _nth_largest(
    keys: Sequence[NDArray[np.complex128]], number: int, *, gather: Gather
) -> np.complex128:
    """Return the n-th largest candidate of all ranks; the smallest one if there are fewer."""
    own = np.concatenate([np.empty(0, np.complex128), *keys])
    everywhere = np.sort(np.concatenate(gather(np.sort(own[own.real > -np.inf])[-number:])))
    return everywhere[-number:][0] if len(everywhere) else np.complex128(np.inf)


def _lottery(part: RowTensors, *, seed: int) -> NDArray[np.float64]:
    """Return a number in [0, 1) for every trained token, (N,): a hash of seed, row and position."""
    mask_BR = part.trained_tokens
    rows_BR = part.per_token(part.row_id_B).expand_as(mask_BR)
    rows = rows_BR[mask_BR].cpu().numpy().astype(np.uint64)
    places = _trained_positions(part)[mask_BR].cpu().numpy().astype(np.uint64)
    mixed = _mix(_mix(_mix(np.full(len(rows), seed, np.uint64)) ^ rows) ^ places)
    return (mixed >> np.uint64(11)) / float(1 << 53)


def _trained_positions(part: RowTensors) -> Tensor:
    """Return the place of every trained token among those of its row, int64 (B, R)."""
    counts_BR = part.trained_tokens.long().cumsum(dim=-1)
    if part.row_of is None:
        return counts_BR - 1
    per_row_B = part.row_sums(part.trained_tokens.long())
    return counts_BR - 1 - part.per_token(per_row_B.cumsum(dim=0) - per_row_B)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the values with their bits mixed, as SplitMix64 does (doi:10.1145/2660193.2660195)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _placed(part: RowTensors, is_selected: NDArray[np.bool_]) -> Tensor:
    """Return the values of the trained tokens at their positions, False elsewhere: bool (B, R)."""
    mask_BR = part.trained_tokens
    placed_BR = torch.zeros_like(mask_BR, dtype=torch.bool)
    placed_BR[mask_BR] = torch.from_numpy(is_selected).to(mask_BR.device)
    return placed_BR
