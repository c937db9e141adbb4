"""Importance weights for the difference between the sampling and the training policy.

Every function returns weights (B, R) without gradient; multiply a token loss of
`turnstream.worker.losses` by them. A weight of 0 drops a token; loss denominators stay as shipped.
`old` are the trainer's own log-probabilities of the sampled tokens, `behaviour` those of the
inference engine. Both are read only where `mask_BR` is set; weights elsewhere have no meaning.

A trajectory that was split into rows has a ratio for each row. Tensors of packed and jagged rows
are flat. Ratios of whole rows then need `row_of=part.row_of`; it is None in other layouts.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from turnstream.worker.losses import clipped_exp, log_ratio, mean_over_row, sum_over_row

Level = Literal["token", "sequence", "geometric"]
"""Unit of a ratio: each token, the product over its row, or the geometric mean of its row."""

_MIS_BOUNDS: dict[Level, tuple[float, float]] = {
    "token": (0.5, 2.0),
    "sequence": (0.5, 2.0),
    "geometric": (0.9999, 1.0001),
}


def importance_ratio(
    old_BR: Tensor,
    *,
    behaviour_BR: Tensor,
    mask_BR: Tensor,
    level: Level,
    row_of: Tensor | None = None,
) -> Tensor:
    """Return exp(old - behaviour), (B, R): by token, or of the row's sum or mean."""
    exponent_BR = log_ratio(old_BR, behaviour_BR, mask_BR=mask_BR).detach()
    match level:
        case "token":
            return clipped_exp(exponent_BR)
        case "sequence":
            exponent_B1 = sum_over_row(exponent_BR, row_of=row_of)
        case "geometric":
            exponent_B1 = mean_over_row(exponent_BR, mask_BR=mask_BR, row_of=row_of)
    return clipped_exp(exponent_B1).expand_as(exponent_BR)


def tis(
    old_BR: Tensor,
    *,
    behaviour_BR: Tensor,
    mask_BR: Tensor,
    level: Level = "token",
    cap: float = 2.0,
    floor: float = 0.0,
    row_of: Tensor | None = None,
) -> Tensor:
    """Return the truncated ratio, (B, R): max(floor, min(ratio, cap)).

    Truncated importance sampling (https://fengyao.notion.site/off-policy-rl). slime sets a floor.
    """
    ratio_BR = importance_ratio(
        old_BR, behaviour_BR=behaviour_BR, mask_BR=mask_BR, level=level, row_of=row_of
    )
    return ratio_BR.clamp(floor, cap)


def icepop(
    old_BR: Tensor, *, behaviour_BR: Tensor, mask_BR: Tensor, low: float = 0.5, high: float = 5.0
) -> Tensor:
    """Return the token ratio if it is in [low, high], else 0, (B, R): IcePop, arXiv:2510.18855."""
    ratio_BR = importance_ratio(old_BR, behaviour_BR=behaviour_BR, mask_BR=mask_BR, level="token")
    return torch.where(_inside(ratio_BR, low=low, high=high), ratio_BR, 0.0)


def mis(
    old_BR: Tensor,
    *,
    behaviour_BR: Tensor,
    mask_BR: Tensor,
    level: Level = "token",
    low: float | None = None,
    high: float | None = None,
    veto_below: float = 1e-4,
    row_of: Tensor | None = None,
) -> Tensor:
    """Return 1 where the ratio is in [low, high], else 0, (B, R); 0 for rows with a vetoed token.

    Masked importance sampling. Multiply by `tis` to mask and to weight. By default, ratios from 0.5
    to 2 pass, or from 0.9999 to 1.0001 for the geometric ratio. A trained token with a ratio below
    `veto_below` drops its row: another policy must have sampled it.
    """
    rows: Any = {"behaviour_BR": behaviour_BR, "mask_BR": mask_BR, "row_of": row_of}
    lowest, highest = _MIS_BOUNDS[level]
    low, high = lowest if low is None else low, highest if high is None else high
    is_kept_BR = _inside(importance_ratio(old_BR, **rows, level=level), low=low, high=high)
    return is_kept_BR * row_veto(old_BR, **rows, low=veto_below)


def row_veto(
    old_BR: Tensor,
    *,
    behaviour_BR: Tensor,
    mask_BR: Tensor,
    low: float = 1e-4,
    high: float = float("inf"),
    row_of: Tensor | None = None,
) -> Tensor:
    """Return 0 for rows that have a trained token with a ratio outside [low, high], else 1."""
    ratio_BR = importance_ratio(old_BR, behaviour_BR=behaviour_BR, mask_BR=mask_BR, level="token")
    outside_BR = mask_BR.bool() & ~_inside(ratio_BR, low=low, high=high)
    allowed_B1 = sum_over_row(outside_BR.long(), row_of=row_of) == 0
    return allowed_B1.to(ratio_BR.dtype).expand_as(ratio_BR)


def seq_mask_tis(
    old_BR: Tensor,
    *,
    behaviour_BR: Tensor,
    mask_BR: Tensor,
    low: float = 0.999,
    high: float = 1.002,
    row_of: Tensor | None = None,
) -> Tensor:
    """Return 0 for rows whose geometric ratio is outside [low, high], else the token ratio.

    As in NeMo-RL, the row filter replaces the truncation.
    """
    rows: Any = {"behaviour_BR": behaviour_BR, "mask_BR": mask_BR, "row_of": row_of}
    row_BR = importance_ratio(old_BR, **rows, level="geometric")
    token_BR = importance_ratio(old_BR, **rows, level="token")
    return torch.where(_inside(row_BR, low=low, high=high), token_BR, 0.0)


def opsm(
    current_BR: Tensor,
    *,
    old_BR: Tensor,
    advantages_BR: Tensor,
    mask_BR: Tensor,
    delta: float = 0.1,
    row_of: Tensor | None = None,
) -> Tensor:
    """Return 0 where A < 0 in rows whose mean of old - current is above `delta`, else 1, (B, R).

    Off-policy sequence masking (slime; DeepSeek-V3.2, arXiv:2512.02556): the policy has already
    moved away from these rows of bad outcome.
    """
    moved_BR = log_ratio(old_BR, current_BR, mask_BR=mask_BR).detach()
    moved_B1 = mean_over_row(moved_BR, mask_BR=mask_BR, row_of=row_of)
    dropped_BR = (advantages_BR < 0) & (moved_B1 > delta)
    return (~dropped_BR).to(current_BR.dtype)


def rescaled(weights_BR: Tensor, *, weight_sum: float | Tensor, num_tokens: int) -> Tensor:
    """Return the weights, (B, R), scaled to a mean of 1 over all `num_tokens` trained tokens.

    `weight_sum` is the sum over all ranks and micro-batches of the mini-batch: with a local mean,
    the loss would depend on the cuts of the batch. Weights that are all 0 stay 0.
    """
    total = torch.as_tensor(weight_sum, dtype=weights_BR.dtype, device=weights_BR.device)
    return weights_BR * torch.where(total > 0, num_tokens / total, 0.0)


def _inside(ratio: Tensor, *, low: float, high: float) -> Tensor:
    return (ratio >= low) & (ratio <= high)
