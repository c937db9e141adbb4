"""A critic: a value model with an optimizer of its own, trained next to the policy.

Its values become the advantages of a step before the first update of the step. All mini-batches are
scored under the weights at its start. Rewards, values and generalised advantage estimation have no
mini-batch in them. Whitening has all trained tokens of the step on all ranks. Advantages, values
and returns stay fixed in all epochs of the step.

Shapes: B rows, R response columns, N picked tokens, T columns, H hidden size.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from turnstream.batching.config.values import RewardSource
from turnstream.batching.layouts.outputs import ResponseValues, join_by_row_id
from turnstream.batching.merge.buffers import row_sums
from turnstream.batching.rows.assemble import joined_column
from turnstream.batching.scoring.token_advantages import (
    gae,
    token_rewards,
    vapo_lambda,
    whiten_tokens,
)
from turnstream.errors import InvalidConfigError
from turnstream.types import ExtraColumn, Ragged, Rows
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


Scored = tuple[PulledMiniBatch, list[Tensor] | None]
"""A mini-batch, and its old log-probabilities if the objective needs them."""

_LEAST_VARIANCE: Final = 1e-8
"""Variance of returns below which no share of it is reported: they hardly differ."""


class _Estimate(NamedTuple):
    """Numbers of the response tokens of one mini-batch; 0 if untrained."""

    rows: Rows
    values: Ragged[Any]
    advantages: Ragged[np.float32]
    returns: Ragged[np.float32]


def with_advantages(
    scored: Iterable[Scored],
    *,
    critic: Critic,
    source: RewardSource,
    penalties: Callable[[PulledMiniBatch, list[Tensor] | None], ResponseValues | None],
    ranks: Ranks,
) -> Iterator[Scored]:
    """Yield the mini-batches of a step with advantages, and with what `Critic.update` reads.

    Every rank calls it. The mini-batches of all epochs are in memory together. The critic keeps
    the statistics of the step. `penalties` are subtracted from the rewards of tokens, by row id.
    """
    of_step = list(scored)
    first = {mini_batch.info.mini_batch: (mini_batch, old) for mini_batch, old in of_step}
    estimates: list[_Estimate] = []
    for mini_batch, old in first.values():
        rows = mini_batch.rows
        rewards = token_rewards(rows, source=source)
        subtracted = penalties(mini_batch, old)
        if subtracted is not None:
            penalty = join_by_row_id([subtracted], rows)
            rewards = Ragged(rewards.values - penalty.values, rewards.offsets)
        values = critic.values(mini_batch)
        estimates.append(_estimate(rows, rewards, values, settings=critic.settings))
    critic.step_statistics = _statistics(estimates, ranks=ranks)
    if critic.settings.whiten == "true":
        estimates = _whitened(estimates, ranks=ranks)
    ready = dict(zip(first, estimates, strict=True))
    for mini_batch, old in of_step:
        estimate = ready[mini_batch.info.mini_batch]
        rows = dataclasses.replace(estimate.rows, advantages=estimate.advantages)
        ready_batch = dataclasses.replace(mini_batch, rows=rows)
        yield with_targets(ready_batch, values=estimate.values, returns=estimate.returns), old


def _estimate(
    rows: Rows, rewards: Ragged[np.float32], values: Ragged[Any], *, settings: GaeSettings
) -> _Estimate:
    """Return the estimates of a mini-batch, before whitening."""
    lam: float | NDArray[np.float64] = settings.lam
    if settings.length_alpha is not None:
        lam = vapo_lambda(row_sums(rows.loss_mask, np.int64), alpha=settings.length_alpha)
    value_lam = settings.lam if settings.value_lam is None else settings.value_lam
    known = {"rewards": rewards, "values": values, "gamma": settings.gamma}
    advantages, _ = gae(rows, **known, lam=lam)
    _, returns = gae(rows, **known, lam=value_lam)
    return _Estimate(rows, values, advantages, returns)


def _whitened(estimates: Sequence[_Estimate], *, ranks: Ranks) -> list[_Estimate]:
    """Return the estimates with advantages of mean 0 and variance 1 over the step."""
    white = whiten_tokens(
        joined_column([each.advantages for each in estimates]),
        loss_mask=joined_column([each.rows.loss_mask for each in estimates]),
        sum_ranks=lambda number: math.fsum(ranks.gather(number)),
    )
    bounds = itertools.pairwise(np.cumsum([0, *[len(each.rows) for each in estimates]]).tolist())
    cuts = [Ragged(white.values, white.offsets[a : b + 1]).flat() for a, b in bounds]
    return [each._replace(advantages=cut) for each, cut in zip(estimates, cuts, strict=True)]


def _statistics(estimates: Sequence[_Estimate], *, ranks: Ranks) -> dict[str, float]:
    """Return means of values and returns, and the explained variance, over the trained tokens."""
    values_N, returns_N = (
        np.concatenate([_trained(getattr(each, name), each.rows) for each in estimates])
        for name in ("values", "returns")
    )

    def totals(*columns: NDArray[np.float64]) -> list[float]:
        own = [math.fsum(column) for column in columns]
        return [math.fsum(column) for column in zip(*ranks.gather(own), strict=True)]

    count, value_sum, return_sum = totals(np.ones(len(values_N)), values_N, returns_N)
    value_mean, return_mean = (each / max(1.0, count) for each in (value_sum, return_sum))
    deviation_N = returns_N - return_mean
    error_N = deviation_N - (values_N - value_mean)
    unexplained, total = totals(error_N**2, deviation_N**2)
    is_known = total > _LEAST_VARIANCE * count
    return {
        "value_mean": value_mean,
        "return_mean": return_mean,
        "explained_variance": 1.0 - unexplained / total if is_known else math.nan,
    }


def _trained(column: Ragged[Any], rows: Rows) -> NDArray[np.float64]:
    is_trained = rows.loss_mask.flat().values.astype(np.bool_)
    return column.flat().values[is_trained].astype(np.float64)
