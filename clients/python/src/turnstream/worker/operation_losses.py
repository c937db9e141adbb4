"""Losses of Tinker-style operations: sums over positions and rows, never means.

The log-probability of the target is p now, and was q in sampling. A is the advantage, w the weight
of the position, and r is exp(p - q). `clip` holds a ratio between the two thresholds::

    cross_entropy        - w * p, summed over the K targets
    importance_sampling  - w * r * A
    ppo                  - w * min(r * A, clip(r) * A)
    cispo                - w * clip(r) * A * p, without a gradient of the ratio
    dro                  - w * (p * A - beta / 2 * (p - q)^2)
    gspo                 ppo with one ratio per row: exp(mean of p - q over the ratio mask), with
                         the gradient of each position's own p

Source: https://tinker-docs.thinkingmachines.ai/losses. Exponents are clipped to +-20.

Shapes: N positions of a forward pass, K targets of a position, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from turnstream.batching.rows.operations import LOSS_SETTINGS
from turnstream.errors import BatchingError
from turnstream.worker.losses import clipped_exp, masked, mean_over_row
from turnstream.worker.operation_tensors import OperationTensors


def target_logprobs(logits_NV: Tensor, *, targets_NK: Tensor) -> Tensor:
    """Return the log-probability of each target at temperature 1, float32 (N, K)."""
    scores_NV = logits_NV.float()
    return scores_NV.gather(-1, targets_NK) - scores_NV.logsumexp(-1, keepdim=True)


def operation_loss(
    current_NK: Tensor,
    part: OperationTensors,
    *,
    loss: str,
    settings: Mapping[str, float] | None = None,
) -> Tensor:
    """Return the loss of each position, float32 (N,); inert rows have weights of 0.

    Args:
        current_NK: log-probabilities of the targets, with a gradient.
        part: the rows. `batching.rows.operations` has checked them.
        loss: a name of LOSS_SETTINGS.
        settings: those that differ from the defaults.

    Raises:
        BatchingError: the loss is unknown, or reads a column that the rows do not have.
    """
    if loss not in LOSS_SETTINGS:
        raise BatchingError(f"loss {loss!r} is not one of {', '.join(LOSS_SETTINGS)}")
    known = {**LOSS_SETTINGS[loss], **(settings or {})}
    if loss == "cross_entropy":
        return -(part.weights_NK * current_NK).sum(dim=1)
    return part.weights_NK[:, 0] * _POLICY_LOSSES[loss](current_NK[:, 0], part, known)


def _importance_sampling(
    current_N: Tensor, part: OperationTensors, settings: Mapping[str, float]
) -> Tensor:
    return -_ratio(current_N, part) * _required(part, "advantages_N")


def _ppo(current_N: Tensor, part: OperationTensors, settings: Mapping[str, float]) -> Tensor:
    return _clipped(_ratio(current_N, part), part, settings)


def _cispo(current_N: Tensor, part: OperationTensors, settings: Mapping[str, float]) -> Tensor:
    ratio_N = _clip(_ratio(current_N.detach(), part), settings)
    return -ratio_N * _required(part, "advantages_N") * current_N


def _dro(current_N: Tensor, part: OperationTensors, settings: Mapping[str, float]) -> Tensor:
    distance_N = current_N - _required(part, "logprobs_N")
    penalty_N = settings["beta"] / 2 * distance_N.square()
    return penalty_N - current_N * _required(part, "advantages_N")


def _gspo(current_N: Tensor, part: OperationTensors, settings: Mapping[str, float]) -> Tensor:
    mask_N = _required(part, "ratio_mask_N")
    fixed_N = current_N.detach()
    exponent_N = masked(fixed_N - _required(part, "logprobs_N"), mask_BR=mask_N)
    mean_N = mean_over_row(exponent_N, mask_BR=mask_N, row_of=part.row_of_N)
    ratio_N = clipped_exp(mean_N) * (current_N - fixed_N).exp()
    return _clipped(ratio_N, part, settings)


_PolicyLoss = Callable[[Tensor, OperationTensors, Mapping[str, float]], Tensor]
_POLICY_LOSSES: Final[dict[str, _PolicyLoss]] = {
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
}


def _ratio(current_N: Tensor, part: OperationTensors) -> Tensor:
    return clipped_exp(current_N - _required(part, "logprobs_N"))


def _clip(ratio_N: Tensor, settings: Mapping[str, float]) -> Tensor:
    return ratio_N.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])


def _clipped(ratio_N: Tensor, part: OperationTensors, settings: Mapping[str, float]) -> Tensor:
    advantages_N = _required(part, "advantages_N")
    return -torch.minimum(ratio_N * advantages_N, _clip(ratio_N, settings) * advantages_N)


def _required(part: OperationTensors, name: str) -> Tensor:
    column: Tensor | None = getattr(part, name)
    if column is None:
        raise BatchingError(f"the rows have no {name.removesuffix('_N')}, which the loss reads")
    return column
