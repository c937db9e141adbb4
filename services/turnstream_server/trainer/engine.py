"""Model and optimizer: gradients of mini-batches, and optimizer steps.

The training loop calls `update` for each mini-batch. Single operations call `forward_backward` as
often as they like, then `optim_step`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnstream.batching.config.values import Aggregation
from turnstream.errors import RejectedError
from turnstream.worker import PulledMiniBatch
from turnstream.worker.layouts import PackedTensors
from turnstream.worker.losses import aggregate, clipped_exp, kl_k3, log_ratio, ppo_clip
from turnstream.worker.tensors import LeftPaddedTensors, RowTensors
from turnstream_server.models.logprobs import response_logprobs
from turnstream_server.models.packed import enable_packing
from turnstream_server.trainer.optimizer import Optimizer, Schedule, StepReport
from turnstream_server.trainer.settings import AdamSettings, Layout, ScheduleSettings

logger = logging.getLogger(__name__)

TrainedRows = LeftPaddedTensors | PackedTensors
"""The rows of a micro-batch."""

_CLIP_LOW: Final = 0.2
_CLIP_HIGH: Final = 0.28
"""The ratio current / behaviour is clipped to [1 - low, 1 + high]."""

_DUAL_CLIP: Final = 3.0
"""Bound of the loss where the advantage is negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossReport:
    """Statistics of the loss of one mini-batch.

    Attributes:
        loss: loss of the whole mini-batch.
        num_recomputed_rows: rows without behaviour log-probabilities.
        ratio: mean of current / behaviour probability over the trained tokens.
        kl: estimate of KL(behaviour || current), in nats.
        clipped_share: share of the ratios outside the clip range; 0 to 1.
        logprob: mean log-probability under the weights before the update, in nats.
    """

    loss: float
    num_recomputed_rows: int
    ratio: float
    kl: float
    clipped_share: float
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport(LossReport):
    """Statistics of one optimizer update: those of its loss, and of `StepReport`."""

    gradient_norm: float
    learning_rate: float
    skip_reason: str

    @property
    def is_applied(self) -> bool:
        """Whether the weights have changed."""
        return not self.skip_reason


class Engine:
    """Trains one model on mini-batches.

    The loss is summed over micro-batches, each divided by the shipped denominators. So it does not
    depend on the cuts and the padding of the mini-batch.

    Args:
        adam: settings of the steps of `update`; their learning rate is that of the schedule.
        layout: shape of a forward pass. "padded" has the rows of a micro-batch at one width.
            "packed" has them one after another, without padding. Both have equal gradients.
        temperature: sampling temperature of the generators.

    Attributes:
        model: in evaluation mode, so that its log-probabilities are those of the sampling policy.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        adam: AdamSettings,
        schedule: ScheduleSettings | None = None,
        layout: Layout = "padded",
        temperature: float = 1.0,
    ) -> None:
        if layout == "packed":
            enable_packing(model)
        self.model = model
        self._layout = layout
        self._adam = adam
        self._schedule = Schedule(schedule or ScheduleSettings(), learning_rate=adam.learning_rate)
        self._temperature = temperature
        self._optimizer = Optimizer(model.named_parameters())
        self._has_gradient = False

    @property
    def num_updates(self) -> int:
        """Optimizer steps so far, with skipped ones and those before a restart."""
        return self._optimizer.num_steps

    @property
    def num_skipped(self) -> int:
        """Skipped optimizer steps so far, with those before a restart."""
        return self._optimizer.num_skipped

    def update(self, mini_batch: PulledMiniBatch, *, aggregation: Aggregation) -> UpdateReport:
        """Apply one optimizer step on the rows of a mini-batch and return its statistics."""
        report = self.forward_backward(mini_batch, aggregation=aggregation)
        rate = self._schedule.learning_rate(self.num_updates + 1)
        step = self.optim_step(dataclasses.replace(self._adam, learning_rate=rate))
        if not step.is_applied:
            logger.warning("step %s: update skipped: %s", mini_batch.info.step, step.skip_reason)
        return UpdateReport(**dataclasses.asdict(report), **dataclasses.asdict(step))

    def forward_backward(
        self, mini_batch: PulledMiniBatch, *, aggregation: Aggregation
    ) -> LossReport:
        """Add the gradient of a mini-batch to those since the last optimizer step."""
        if not self._has_gradient:
            self._optimizer.clear()
        self._has_gradient = True
        parts = self._micro_batches(mini_batch)
        sums = torch.stack([self._backward(part, aggregation=aggregation) for part in parts])
        loss, num_recomputed, *token_sums = sums.sum(dim=0).tolist()
        num_tokens = max(1, mini_batch.info.denominators.num_tokens)
        ratio, kl, clipped_share, logprob = (total / num_tokens for total in token_sums)
        return LossReport(
            loss=loss,
            num_recomputed_rows=int(num_recomputed),
            ratio=ratio,
            kl=kl,
            clipped_share=clipped_share,
            logprob=logprob,
        )

    def optim_step(self, settings: AdamSettings) -> StepReport:
        """Apply the sum of the gradients since the last step.

        Raises:
            RejectedError: there was no `forward_backward` since then.
        """
        if not self._has_gradient:
            raise RejectedError("no forward_backward since the last optim_step: no gradient")
        self._has_gradient = False
        return self._optimizer.step(settings)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the next update, without the weights."""
        return {"optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict()`; the caller restores the weights."""
        self._optimizer.load_state_dict(state["optimizer"])

    def _micro_batches(self, mini_batch: PulledMiniBatch) -> Iterable[TrainedRows]:
        if self._layout == "packed":
            return mini_batch.to_torch_packed(self.model.device)
        return mini_batch.to_torch(self.model.device).micro_batches()

    def _backward(self, part: TrainedRows, *, aggregation: Aggregation) -> Tensor:
        """Add the gradient of one micro-batch; return its loss and its sums for the report.

        The clipped policy gradient has the behaviour policy as the old one ("bypass"). A row
        without behaviour log-probabilities takes the current ones in their place. These are of the
        weights before the update, so its ratio is 1 and its gradient the plain policy gradient.
        """
        mask_BR = part.trained_tokens
        current_BR = response_logprobs(
            self.model, part, mask_BR=mask_BR, temperature=self._temperature
        )
        old_BR, is_recomputed_B = _old_logprobs(current_BR.detach(), part)
        loss_BR = ppo_clip(
            current_BR,
            old_BR=old_BR,
            advantages_BR=part.advantages,
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


def _old_logprobs(current_BR: Tensor, part: RowTensors) -> tuple[Tensor, Tensor]:
    """Return the behaviour log-probabilities, (B, R), and the rows without any, bool (B,)."""
    if part.logprobs is None:
        return current_BR, part.row_sums(part.trained_tokens.long()) > 0
    is_missing_BR = part.logprobs.isnan() & part.trained_tokens
    missing_B = part.row_sums(is_missing_BR.long()) > 0
    return torch.where(part.per_token(missing_B), current_BR, part.logprobs), missing_B
