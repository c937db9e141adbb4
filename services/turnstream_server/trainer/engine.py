"""Model and optimizer: one mini-batch in, one optimizer update done."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnstream.batching.config.values import Aggregation
from turnstream.worker import PulledMiniBatch
from turnstream.worker.losses import aggregate, clipped_exp, kl_k3, log_ratio, ppo_clip
from turnstream.worker.tensors import LeftPaddedTensors
from turnstream_server.models.logprobs import response_logprobs

logger = logging.getLogger(__name__)

_BETAS: Final = (0.9, 0.95)
_CLIP_LOW: Final = 0.2
_CLIP_HIGH: Final = 0.28
"""The ratio current / behaviour is clipped to [1 - low, 1 + high]."""

_DUAL_CLIP: Final = 3.0
"""Bound of the loss where the advantage is negative."""

_MAX_GRAD_NORM: Final = 1.0
"""Gradients of a larger global norm are scaled down to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """Statistics of one optimizer update.

    Attributes:
        loss: loss of the whole mini-batch.
        gradient_norm: before clipping.
        is_applied: False if the gradient was not finite: the weights are unchanged.
        num_recomputed_rows: rows without behaviour log-probabilities.
        ratio: mean of current / behaviour probability over the trained tokens.
        kl: estimate of KL(behaviour || current), in nats.
        clipped_share: share of the ratios outside the clip range; 0 to 1.
        logprob: mean log-probability under the weights before the update, in nats.
    """

    loss: float
    gradient_norm: float
    learning_rate: float
    is_applied: bool
    num_recomputed_rows: int
    ratio: float
    kl: float
    clipped_share: float
    logprob: float


class Engine:
    """Trains one model on mini-batches, one optimizer update each.

    The loss is summed over micro-batches, each divided by the shipped denominators. So it does not
    depend on the cuts and the padding of the mini-batch.

    Args:
        learning_rate: the rate of AdamW after `warmup_updates` updates of linear growth.
        temperature: sampling temperature of the generators.

    Attributes:
        model: in evaluation mode, so that its log-probabilities are those of the sampling policy.
        num_updates: updates so far, with those before a restart.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        learning_rate: float,
        warmup_updates: int = 0,
        temperature: float = 1.0,
    ) -> None:
        self.model = model
        self.num_updates = 0
        self._learning_rate = learning_rate
        self._warmup_updates = warmup_updates
        self._temperature = temperature
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=learning_rate, betas=_BETAS, weight_decay=0.0
        )

    def update(self, mini_batch: PulledMiniBatch, *, aggregation: Aggregation) -> UpdateReport:
        """Apply one optimizer step on the rows of a mini-batch and return its statistics."""
        parts = mini_batch.to_torch(self.model.device).micro_batches()
        self._optimizer.zero_grad(set_to_none=True)
        sums = torch.stack([self._backward(part, aggregation=aggregation) for part in parts])
        loss, num_recomputed, *token_sums = sums.sum(dim=0).tolist()
        num_tokens = max(1, mini_batch.info.denominators.num_tokens)
        ratio, kl, clipped_share, logprob = (total / num_tokens for total in token_sums)
        learning_rate = self._next_learning_rate()
        gradient_norm = self._step(learning_rate)
        is_applied = math.isfinite(gradient_norm)
        if not is_applied:
            step = mini_batch.info.step
            logger.warning("step %s: gradient is not finite, update skipped", step)
        return UpdateReport(
            loss=loss,
            gradient_norm=gradient_norm,
            learning_rate=learning_rate,
            is_applied=is_applied,
            num_recomputed_rows=int(num_recomputed),
            ratio=ratio,
            kl=kl,
            clipped_share=clipped_share,
            logprob=logprob,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the next update, without the weights."""
        return {"optimizer": self._optimizer.state_dict(), "num_updates": self.num_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict()`; the caller restores the weights."""
        self._optimizer.load_state_dict(state["optimizer"])
        self.num_updates = state["num_updates"]

    def _backward(self, part: LeftPaddedTensors, *, aggregation: Aggregation) -> Tensor:
        """Add the gradient of one micro-batch; return its loss and its sums for the report.

        The clipped policy gradient has the behaviour policy as the old one ("bypass"). A row
        without behaviour log-probabilities takes the current ones in their place. These are of the
        weights before the update, so its ratio is 1 and its gradient the plain policy gradient.
        """
        mask_BR = part.loss_mask_BR
        current_BR = response_logprobs(
            self.model, part, mask_BR=mask_BR, temperature=self._temperature
        )
        old_BR, is_recomputed_B = _old_logprobs(current_BR.detach(), part)
        loss_BR = ppo_clip(
            current_BR,
            old_BR=old_BR,
            advantages_BR=part.advantages_BR,
            mask_BR=mask_BR,
            clip_low=_CLIP_LOW,
            clip_high=_CLIP_HIGH,
            dual_clip=_DUAL_CLIP,
        )
        loss = aggregate(loss_BR, part, mode=aggregation, denominators=part.denominators)
        loss.backward()
        with torch.no_grad():
            ratio_BR = clipped_exp(log_ratio(current_BR, old_BR, mask_BR=mask_BR))
            is_kept_BR = ratio_BR.clamp(1 - _CLIP_LOW, 1 + _CLIP_HIGH) == ratio_BR
            kl_BR = kl_k3(old_BR, reference_BR=current_BR, mask_BR=mask_BR)
            columns = (ratio_BR, kl_BR, ~is_kept_BR, current_BR)
            sums = [(column * mask_BR).sum(dtype=torch.float64) for column in columns]
        return torch.stack([loss.detach().double(), is_recomputed_B.sum().double(), *sums])

    def _next_learning_rate(self) -> float:
        share = min(1.0, (self.num_updates + 1) / max(1, self._warmup_updates))
        return self._learning_rate * share

    def _step(self, learning_rate: float) -> float:
        """Apply the gradient if it is finite; return its norm before clipping."""
        parameters = self.model.parameters()
        norm = torch.nn.utils.clip_grad_norm_(parameters, _MAX_GRAD_NORM).item()
        if math.isfinite(norm):
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
        self.num_updates += 1
        return norm


def _old_logprobs(current_BR: Tensor, part: LeftPaddedTensors) -> tuple[Tensor, Tensor]:
    """Return the behaviour log-probabilities, (B, R), and the rows without any, bool (B,)."""
    has_trained_B = part.loss_mask_BR.any(dim=1)
    if part.logprobs_BR is None:
        return current_BR, has_trained_B
    missing_B = (part.logprobs_BR.isnan() & part.loss_mask_BR).any(dim=1)
    return torch.where(missing_B[:, None], current_BR, part.logprobs_BR), missing_B
