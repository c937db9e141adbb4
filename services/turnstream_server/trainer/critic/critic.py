"""A critic: a value model with an optimizer of its own, trained next to the policy."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from turnstream.batching.layouts.outputs import join_by_row_id
from turnstream.errors import InvalidConfigError
from turnstream.types import ExtraColumn, Ragged
from turnstream.worker import PulledMiniBatch
from turnstream.worker.layouts import PackedTensors
from turnstream.worker.losses import aggregate, clipped_value_loss, masked
from turnstream.worker.tensors import LeftPaddedTensors
from turnstream_server.models.logprobs import ScoringSlots, placed_scores
from turnstream_server.models.sharding import is_sharded
from turnstream_server.trainer.critic.config import GaeSettings
from turnstream_server.trainer.optimizer import Optimizer
from turnstream_server.trainer.ranks import ONE_RANK, Ranks
from turnstream_server.trainer.settings import AdamSettings, Layout

logger = logging.getLogger(__name__)


class ValueModel(nn.Module):
    """The layers of a causal language model, with a linear head to one number, which begins at 0.

    The layers become those of this model; the unembedding of the policy is dropped.
    """

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        backbone = cast(PreTrainedModel, policy.base_model)
        if backbone is policy:
            kind = policy.config.model_type
            raise InvalidConfigError("--critic", f"a {kind} model has no layers without its head")
        size = policy.config.get_text_config().hidden_size
        self.backbone = backbone
        self.head = nn.Linear(size, 1, device=policy.device, dtype=policy.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.backbone.device

    def forward(self, slots: ScoringSlots) -> Tensor:
        """Return the values at these slots, (N,), in the type of the head, also under autocast."""
        hidden_BTH = self.backbone(**slots.inputs).last_hidden_state
        hidden_NH = hidden_BTH[slots.row_N, slots.slot_N].to(self.head.weight.dtype)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            return self.head(hidden_NH)[:, 0]


def response_values(
    model: ValueModel, rows: LeftPaddedTensors | PackedTensors, *, mask_BR: Tensor
) -> Tensor:
    """Return the value before each response token, 0 outside the mask: float32 (B, R).

    It is read from the hidden state of the token before, like the log-probability. So it does not
    depend on the token itself, and the first response token has that of the prompt. The result of
    an empty mask is differentiable too; its gradient is 0. For packed rows, mask and result are of
    their slots, (N,).
    """

    def read(slots: ScoringSlots) -> Tensor:
        return cast(Tensor, model(slots))[None]

    return placed_scores(model.backbone, rows, mask_BR=mask_BR, read=read)[0]


_VALUE: Final = "critic.value"
_RETURN: Final = "critic.return"
"""Columns of rows with targets: values at the start of the step, and returns."""


class Critic:
    """Scores and trains one value model on mini-batches.

    The loss is the mean over the trained tokens of the whole mini-batch, weighted as the policy
    loss is. It does not depend on cuts, padding and ranks. All ranks make the same calls.

    Args:
        model: value model; its optimizer is made here. All ranks begin with equal weights.
        settings: parameters of the critic.
        adam: settings of the optimizer; the learning rate is that of `settings`.
        layout: shape of a forward pass; "packed" needs a model that was prepared for it.
        dtype: type of the matrix products.
        ranks: those of the trainer.

    Attributes:
        step_statistics: numbers of the whole step, which `update` reports in addition to its own.
    """

    def __init__(
        self,
        model: ValueModel,
        *,
        settings: GaeSettings,
        adam: AdamSettings,
        layout: Layout = "padded",
        dtype: torch.dtype = torch.float32,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self.model = model
        self.settings = settings
        self.step_statistics: Mapping[str, float] = {}
        self._adam = dataclasses.replace(adam, learning_rate=settings.learning_rate)
        self._layout = layout
        self._dtype = dtype
        self._ranks = ranks
        self._optimizer = Optimizer(model.named_parameters(), ranks=ranks)

    @torch.no_grad()
    def values(self, mini_batch: PulledMiniBatch) -> Ragged[Any]:
        """Return the value before each response token, float32; 0 if untrained or inert."""
        found = [
            part.response_values(self._values(part)) for part in self._micro_batches(mini_batch)
        ]
        return join_by_row_id(found, mini_batch.rows)

    def update(self, mini_batch: PulledMiniBatch) -> dict[str, float]:
        """Apply one optimizer step on rows of `with_targets` and return its statistics.

        A step with a gradient that is not finite is skipped, and counted.
        """
        self._optimizer.clear()
        sums = sum(
            (self._backward(part) for part in self._micro_batches(mini_batch)),
            start=torch.zeros(2, dtype=torch.float64, device=self.model.device),
        )
        step = self._optimizer.step(self._adam)
        if not step.is_applied:
            logger.warning("step %s: critic skipped: %s", mini_batch.info.step, step.skip_reason)
        shares = self._ranks.gather(sums.tolist())
        loss, num_clipped = (sum(column) for column in zip(*shares, strict=True))
        return {
            **self.step_statistics,
            "value_loss": loss,
            "value_clipped_share": num_clipped / max(1, mini_batch.info.denominators.num_tokens),
            "critic_gradient_norm": step.gradient_norm,
            "total_skipped_critic_updates": self._optimizer.num_skipped,
        }

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, with the weights."""
        return self._optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return weights and moments, without what is sharded."""
        weights = {} if is_sharded(self.model) else {"model": self.model.state_dict()}
        return {**weights, "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore a state of `state_dict()`.

        Raises:
            InvalidConfigError: there is none, or it is that of another model.
        """
        if state is None:
            message = "the checkpoint has no critic: train in another --folder, or without --critic"
            raise InvalidConfigError("--critic", message)
        try:
            if not is_sharded(self.model):
                self.model.load_state_dict(state["model"])
        except RuntimeError as error:  # torch names the weights that differ
            message = f"the critic of the checkpoint is another model: {error}"
            raise InvalidConfigError("--critic", message) from error
        self._optimizer.load_state_dict(state["optimizer"])

    def _backward(self, part: LeftPaddedTensors | PackedTensors) -> Tensor:
        """Add the gradient of a micro-batch; return its loss and clipped tokens, float64 (2,)."""
        mask_BR, clip = part.trained_tokens, self.settings.value_clip
        values_BR = self._values(part)
        old_BR, returns_BR = part.extras[_VALUE].values, part.extras[_RETURN].values
        loss_BR = clipped_value_loss(
            values_BR, old_BR=old_BR, returns_BR=returns_BR, mask_BR=mask_BR, clip=clip
        )
        loss = aggregate(loss_BR, part, mode="token_mean")
        loss.backward()
        moved_BR = masked(values_BR.detach() - old_BR, mask_BR=mask_BR).abs()
        num_clipped = (moved_BR > (float("inf") if clip is None else clip)).sum()
        return torch.stack([loss.detach().double(), num_clipped.double()])

    def _values(self, part: LeftPaddedTensors | PackedTensors) -> Tensor:
        is_lower = self._dtype != torch.float32
        with torch.autocast(self.model.device.type, dtype=self._dtype, enabled=is_lower):
            return response_values(self.model, part, mask_BR=part.trained_tokens)

    def _micro_batches(
        self, mini_batch: PulledMiniBatch
    ) -> list[LeftPaddedTensors] | list[PackedTensors]:
        if self._layout == "packed":
            return mini_batch.to_torch_packed(self.model.device)
        return [*mini_batch.to_torch(self.model.device).micro_batches()]


def with_targets(
    mini_batch: PulledMiniBatch, *, values: Ragged[Any], returns: Ragged[Any]
) -> PulledMiniBatch:
    """Return the mini-batch with the numbers that `Critic.update` reads, 0 if untrained.

    `values` are under the critic at the start of the step, `returns` what it learns.
    """
    columns = {_VALUE: values, _RETURN: returns}
    extras = {
        **mini_batch.rows.extras,
        **{name: ExtraColumn(per="response_token", values=v) for name, v in columns.items()},
    }
    rows = dataclasses.replace(mini_batch.rows, extras=extras)
    return dataclasses.replace(mini_batch, rows=rows)
