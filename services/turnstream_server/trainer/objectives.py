"""The loss of every trained token, from current and behaviour log-probabilities.

Shapes: B rows, R response columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from turnstream.worker.losses import clipped_exp, kl_k3, log_ratio, ppo_clip
from turnstream.worker.tensors import LeftPaddedTensors
from turnstream_server.trainer.config import ObjectiveConfig


class TokenLosses(NamedTuple):
    """Losses of a micro-batch, and what is worth watching of it.

    Attributes:
        loss_BR: with gradient, exactly 0 where nothing is trained.
        token_sums: float64 (4,), over the trained tokens: ratio, KL(behaviour || current), number
            of ratios outside the clip range, log-probability.
        num_recomputed_rows: rows that came without the log-probabilities of their trained tokens.
    """

    loss_BR: Tensor
    token_sums: Tensor
    num_recomputed_rows: Tensor


def policy_loss(
    current_BR: Tensor, part: LeftPaddedTensors, *, objective: ObjectiveConfig
) -> TokenLosses:
    """The clipped policy gradient with the behaviour policy as the old one ("bypass").

    A row without behaviour log-probabilities takes the current ones for them: these are the weights
    before the update, so its ratio is 1 and its gradient the plain policy gradient.
    """
    mask_BR = part.loss_mask_BR
    old_BR, missing_B = _old_logprobs(current_BR.detach(), part)
    loss_BR = ppo_clip(
        current_BR,
        old_BR=old_BR,
        advantages_BR=part.advantages_BR,
        mask_BR=mask_BR,
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        dual_clip=objective.dual_clip or None,
    )
    with torch.no_grad():
        ratio_BR = clipped_exp(log_ratio(current_BR, old_BR, mask_BR=mask_BR))
        outside_BR = (ratio_BR < 1 - objective.clip_low) | (ratio_BR > 1 + objective.clip_high)
        kl_BR = kl_k3(old_BR, reference_BR=current_BR, mask_BR=mask_BR)
        columns = (ratio_BR, kl_BR, outside_BR.double(), current_BR)
        token_sums = torch.stack(
            [(column * mask_BR).sum(dtype=torch.float64) for column in columns]
        )
    return TokenLosses(loss_BR, token_sums, missing_B.sum())


def _old_logprobs(current_BR: Tensor, part: LeftPaddedTensors) -> tuple[Tensor, Tensor]:
    """The behaviour log-probabilities, (B, R), and which rows had none, bool (B,)."""
    has_trained_B = part.loss_mask_BR.any(dim=1)
    if part.logprobs_BR is None:
        return current_BR, has_trained_B
    missing_B = (part.logprobs_BR.isnan() & part.loss_mask_BR).any(dim=1)
    return torch.where(missing_B[:, None], current_BR, part.logprobs_BR), missing_B
