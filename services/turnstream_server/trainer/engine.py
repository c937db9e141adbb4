"""Model and optimizer: gradients of mini-batches, and optimizer steps.

The training loop calls `update` for each mini-batch. Single operations call `optim_step` after any
number of `forward_backward`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from turnstream.batching.config.values import Aggregation
from turnstream.errors import InvalidConfigError
from turnstream.types import MiniBatch
from turnstream.worker import PulledMiniBatch
from turnstream_server.models.sharding import is_sharded, whole_state, whole_weights
from turnstream_server.trainer.combinations import check_critic
from turnstream_server.trainer.critic.critic import Critic
from turnstream_server.trainer.metrics import LossReport, StepReport, UpdateReport
from turnstream_server.trainer.objectives.config import ObjectiveConfig
from turnstream_server.trainer.objectives.objective import Objective
from turnstream_server.trainer.objectives.scores import (
    KnownPart,
    PreparedPart,
    lacks_logprobs,
    token_scores,
)
from turnstream_server.trainer.optimizer import Optimizer, Schedule
from turnstream_server.trainer.passes import (
    OperationLoss,
    OperationReport,
    Passes,
    Turns,
    last_value,
    run_passes,
)
from turnstream_server.trainer.ranks import ONE_RANK, Ranks
from turnstream_server.trainer.settings import AdamSettings, Layout, ScheduleSettings

if TYPE_CHECKING:
    from turnstream_server.models.adapters import Adapter

logger = logging.getLogger(__name__)

OldLogprobs = Sequence[Tensor] | None
"""Log-probabilities of every micro-batch, as `Engine.logprobs` returns them."""

WriteWeights = Callable[[Path], None]
"""Writes weights into a folder."""


class Engine:
    """Trains one model on mini-batches.

    The loss is summed over micro-batches and ranks, each divided by the shipped denominators. So it
    does not depend on the cuts and the padding of the mini-batch. All ranks make the same calls,
    each with its share, and get the same reports.

    Args:
        adapter: adapter of the model that is trained; None trains all weights. Several engines may
            share a model, each with its own adapter.
        adam: settings of the steps of `update`; their learning rate is that of the schedule.
        layout: shape of a forward pass. "padded" has the rows of a micro-batch at one width.
            "packed" has them one after another, without padding. Both have equal gradients.
        dtype: type of the matrix products. Weights, gradients, moments and losses stay float32.
        temperature: sampling temperature of the generators.
        objective: None for the default one. Others have `ranks.gather` as their `gather`.
        reference: policy that the KL is measured to; it needs no gradient. None with an adapter
            takes the base model.
        critic: one that is trained next to the model; its state is part of the state here.
        ranks: all of them begin with equal weights.

    Attributes:
        model: in evaluation mode, so that its log-probabilities are those of the sampling policy.
        critic: as passed; the caller trains it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        adam: AdamSettings,
        adapter: Adapter | None = None,
        schedule: ScheduleSettings | None = None,
        layout: Layout = "padded",
        dtype: torch.dtype = torch.float32,
        temperature: float = 1.0,
        objective: Objective | None = None,
        reference: PreTrainedModel | None = None,
        critic: Critic | None = None,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self._ranks = ranks
        self.critic = critic
        self._objective = objective or Objective(ObjectiveConfig(), gather=ranks.gather)
        if self._objective.needs_reference and reference is None and adapter is None:
            raise InvalidConfigError("--kl", "there is no reference policy: use --reference")
        check_critic(self._objective.config, has_critic=critic is not None)
        self.model = model
        self._adapter = adapter
        self._passes = Passes(
            model=model,
            adapter=adapter,
            reference=reference,
            layout=layout,
            dtype=dtype,
            temperature=temperature,
        )
        self._passes.prepare()
        self._adam = adam
        self._schedule = Schedule(schedule or ScheduleSettings(), learning_rate=adam.learning_rate)
        self._optimizer = Optimizer((adapter or model).named_parameters(), ranks=ranks)
        self._has_gradient = False

    @property
    def num_updates(self) -> int:
        """Optimizer steps so far, with skipped ones and those before a restart."""
        return self._optimizer.num_steps

    @property
    def num_skipped(self) -> int:
        """Skipped optimizer steps so far, with those before a restart."""
        return self._optimizer.num_skipped

    def with_old_logprobs(
        self, mini_batches: Iterable[PulledMiniBatch]
    ) -> Iterator[tuple[PulledMiniBatch, list[Tensor] | None]]:
        """Yield the mini-batches of a step, with the `old` argument of `update` for each.

        The objective may need log-probabilities under the weights at the start of the step. Then
        all mini-batches are scored before the first is yielded, and are in memory together. For
        other objectives, `old` is None.
        """
        if self._objective.config.proximal == "rollout":
            yield from ((mini_batch, None) for mini_batch in mini_batches)
            return
        of_step = list(mini_batches)
        scored = {each.info.mini_batch: each for each in of_step}
        old = {number: self.logprobs(each) for number, each in scored.items()}
        yield from ((mini_batch, old[mini_batch.info.mini_batch]) for mini_batch in of_step)

    @torch.no_grad()
    def logprobs(self, mini_batch: PulledMiniBatch) -> list[Tensor]:
        """Return the log-probabilities of every micro-batch, float32 (B, R), without a gradient."""
        self._passes.activate()
        return [self._passes.logprobs(part) for part in self._passes.micro_batches(mini_batch)]

    @torch.no_grad()
    def token_penalties(
        self, mini_batch: PulledMiniBatch, old: OldLogprobs
    ) -> dict[int, NDArray[np.float32]] | None:
        """Return coefficient * KL(old || reference) of every real row, float32 (R,), by its id.

        None unless the objective subtracts it from rewards. `old` is as for `update`.
        """
        if not self._objective.penalises_rewards:
            return None
        self._passes.activate()
        known = self._known(mini_batch, old)
        # All ranks or none: a pass gathers the shards of all ranks.
        is_scored = any(self._ranks.gather(any(lacks_logprobs(each.part) for each in known)))
        found: dict[int, NDArray[np.float32]] = {}
        for each in known:
            fallback_BR = self._passes.logprobs(each.part) if is_scored else each.part.logprobs
            assert fallback_BR is not None
            scores, _ = token_scores(each, fallback_BR)
            found |= each.part.response_values(self._objective.token_penalty(each.part, scores))
        return found

    def update(
        self, mini_batch: PulledMiniBatch, *, aggregation: Aggregation, old: OldLogprobs = None
    ) -> UpdateReport:
        """Apply one optimizer step on the rows of a mini-batch and return its statistics.

        `old` is as for `forward_backward`. An adaptive KL coefficient changes after the step.
        """
        report = self.forward_backward(mini_batch, aggregation=aggregation, old=old)
        rate = self._schedule.learning_rate(self.num_updates + 1)
        began_s = time.monotonic()
        step = self.optim_step(dataclasses.replace(self._adam, learning_rate=rate))
        optimizer_s = time.monotonic() - began_s
        if step.is_applied:
            num_trajectories = mini_batch.info.denominators.num_trajectories
            self._objective.adapt(report.statistics, num_trajectories=num_trajectories)
        else:
            logger.warning("step %s: update skipped: %s", mini_batch.info.step, step.skip_reason)
        parts = {**dataclasses.asdict(report), **dataclasses.asdict(step)}
        return UpdateReport(**parts, optimizer_s=optimizer_s)

    def forward_backward(
        self, mini_batch: PulledMiniBatch, *, aggregation: Aggregation, old: OldLogprobs = None
    ) -> LossReport:
        """Add the gradient of a mini-batch to those since the last optimizer step.

        `old` is the result of `logprobs` at the start of the step. None takes the generator's
        numbers, or those before this call if the objective recomputes.
        """
        return last_value(self.forward_backward_turns(mini_batch, aggregation=aggregation, old=old))

    def forward_backward_turns(
        self, mini_batch: PulledMiniBatch, *, aggregation: Aggregation, old: OldLogprobs = None
    ) -> Turns[LossReport]:
        """Run `forward_backward`; other engines of the model may run between micro-batches."""
        self._begin_gradients()
        if old is None and self._objective.config.proximal == "recompute":
            old = self.logprobs(mini_batch)
        known = self._known(mini_batch, old)
        prepared = self._prepare(mini_batch, known)
        done: list[tuple[Tensor, Tensor]] = []
        for each, ready in zip(known, prepared, strict=True):
            if done:
                yield
                self._passes.activate()
            done.append(self._backward(each, ready, aggregation=aggregation))
        statistics = self._objective.report(
            [row for row, _ in done], num_tokens=mini_batch.info.denominators.num_tokens
        )
        num_recomputed_rows = sum(int(missing_B.sum()) for _, missing_B in done)
        return LossReport(
            loss=statistics.pop("loss"),
            num_recomputed_rows=sum(self._ranks.gather(num_recomputed_rows)),
            statistics=statistics,
        )

    def optim_step(self, settings: AdamSettings) -> StepReport:
        """Apply the sum of the gradients of all ranks since the last step; it may be zero."""
        if not self._has_gradient:
            self._begin_gradients()
            self._optimizer.zero()
        self._has_gradient = False
        return self._optimizer.step(settings)

    def has_finite_gradient(self) -> bool:
        """Return whether the gradients of this rank since the last step are finite."""
        return self._optimizer.has_finite_gradient()

    def use_objective(self, objective: Objective) -> None:
        """Train with another objective from the next `forward_backward` on."""
        self._objective = objective

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has a shard of each weight, and not the whole model."""
        return is_sharded(self.model)

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers by their owner, "policy" and "critic"; each has the weights it trains."""
        of_critic = {} if self.critic is None else {"critic": self.critic.optimizer}
        return {"policy": self._optimizer, **of_critic}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the next update, without the weights and what is sharded."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "objective": self._objective.state_dict(),
            "lora_alpha": None if self._adapter is None else self._adapter.alpha,
            "base": None if self._adapter is None else self._adapter.base,
            **({} if self.critic is None else {"critic": self.critic.state_dict()}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict()`; the caller restores the weights.

        Raises:
            InvalidConfigError: the state is that of an adapter with another alpha or base model.
        """
        if self._adapter is not None:
            _require("lora_alpha", self._adapter.alpha, state["lora_alpha"])
            # An unsharded checkpoint is a folder that names its base model.
            _require("--policy", self._adapter.base, state.get("base", self._adapter.base))
        self._optimizer.load_state_dict(state["optimizer"])
        self._objective.load_state_dict(state.get("objective", {}))
        if self.critic is not None:
            self.critic.load_state_dict(state.get("critic"))

    @torch.no_grad()
    def forward(self, mini_batch: PulledMiniBatch) -> dict[int, NDArray[np.float32]]:
        """Return the log-probabilities of every real row, float32 (R,), by its id.

        Tokens that are not trained have 0. The gradients stay as they are.
        """
        self._passes.activate()
        values: dict[int, NDArray[np.float32]] = {}
        for part in self._passes.micro_batches(mini_batch):
            values |= part.response_values(self._passes.logprobs(part))
        return values

    def forward_backward_operations(
        self, mini_batch: MiniBatch, *, loss: OperationLoss
    ) -> OperationReport:
        """Add the gradient of rows of operations to those since the last optimizer step.

        The gradient is that of the sum of all losses, on all ranks. The report has the rows of this
        rank.
        """
        self._begin_gradients()
        return self._run_operations(mini_batch, loss=loss, after_pass=torch.Tensor.backward)

    @torch.no_grad()
    def forward_operations(self, mini_batch: MiniBatch, *, loss: OperationLoss) -> OperationReport:
        """Return the report of `forward_backward_operations`; the gradients stay as they are."""
        self._passes.activate()
        return self._run_operations(mini_batch, loss=loss, after_pass=lambda _: None)

    def gather_weights(self) -> WriteWeights:
        """Return a function that writes the trained weights, whole, into an existing folder.

        All ranks call this, and the first one the function. The folder has a whole model, or an
        adapter.
        """
        weights: dict[str, Tensor] | None = None
        if self._adapter is not None:
            if self.is_sharded:
                weights = whole_weights(self._adapter.named_parameters(), only_rank=0)
            return functools.partial(self._adapter.write, weights=weights)
        if self.is_sharded:
            weights = whole_state(self.model, only_rank=0)
        return functools.partial(self.model.save_pretrained, state_dict=weights)

    def _begin_gradients(self) -> None:
        """Keep the gradients since the last optimizer step, and drop older ones."""
        if not self._has_gradient:
            self._optimizer.clear()
        self._has_gradient = True
        self._passes.activate()

    def _run_operations(
        self, mini_batch: MiniBatch, *, loss: OperationLoss, after_pass: Callable[[Tensor], None]
    ) -> OperationReport:
        score, device = self._passes.target_logprobs, self.model.device
        return run_passes(mini_batch, score, loss=loss, device=device, after_pass=after_pass)

    @torch.no_grad()
    def _known(self, mini_batch: PulledMiniBatch, old: OldLogprobs) -> list[KnownPart]:
        parts = self._passes.micro_batches(mini_batch)
        olds = [None] * len(parts) if old is None else old
        refers = self._objective.needs_reference
        return [
            KnownPart(part, old_BR, self._passes.reference_logprobs(part) if refers else None)
            for part, old_BR in zip(parts, olds, strict=True)
        ]

    @torch.no_grad()
    def _prepare(
        self, mini_batch: PulledMiniBatch, known: Sequence[KnownPart]
    ) -> list[PreparedPart] | list[None]:
        """Return the micro-batches as the objective prepares them; None for each if it does not."""
        objective = self._objective
        if not objective.needs_preparation:
            return [None] * len(known)
        scores = [
            token_scores(
                each,
                each.old_BR
                if each.old_BR is not None and not objective.prepares_with_current
                else self._passes.logprobs(each.part),
            )[0]
            for each in known
        ]
        parts = [each.part for each in known]
        return objective.prepare(parts, scores, rows=mini_batch.rows, seed=self.num_updates)

    def _backward(
        self, known: KnownPart, prepared: PreparedPart | None, *, aggregation: Aggregation
    ) -> tuple[Tensor, Tensor]:
        """Add the gradient of one micro-batch; return its statistics and its rows without logprobs.

        A row without behaviour log-probabilities takes the old ones in their place, or the current
        ones if nothing is recomputed. Then its ratio is 1 and its gradient the plain policy
        gradient.
        """
        part = known.part
        if self._objective.needs_entropies:
            current_BR, entropies_BR = self._passes.logprobs_and_entropies(part)
        else:
            current_BR, entropies_BR = self._passes.logprobs(part), None
        scores, missing_B = token_scores(known, current_BR, entropies_BR=entropies_BR)
        prepared = prepared or self._objective.prepare_alone(part, scores)
        loss, row = self._objective.loss(prepared, scores, aggregation=aggregation)
        loss.backward()
        return row, missing_B


def _require(field: str, own: object, stored: object) -> None:
    if own != stored:
        raise InvalidConfigError(field, f"{own}, and the checkpoint has {stored}")
