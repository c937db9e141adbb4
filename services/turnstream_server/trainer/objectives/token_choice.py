"""The tokens of a mini-batch that Clip-Cov and KL-Cov select, by covariance (arXiv:2505.22617).

A choice depends on the mini-batch and on `seed` alone, not on its micro-batches, layout, padding or
ranks. Random choices and equal covariances are decided by a hash of seed, row and position.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnstream.worker.losses import clipped_exp, log_ratio
from turnstream.worker.policy_losses import covariances
from turnstream.worker.tensors import RowTensors
from turnstream_server.trainer.objectives.parameters import ClipCov, KlCov
from turnstream_server.trainer.objectives.scores import Gather, PreparedPart, TokenScores

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
