"""Forward passes of a policy and of its reference, over rows of runs and of operations.

Work pauses between them, so that the passes of several models take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from turnstream.types import MiniBatch
from turnstream.worker import PulledMiniBatch
from turnstream.worker.layouts import PackedTensors
from turnstream.worker.operation_losses import operation_loss
from turnstream.worker.operation_tensors import OperationTensors, operation_tensors
from turnstream.worker.tensors import LeftPaddedTensors
from turnstream_server.models.logprobs import (
    packed_target_logprobs,
    padded_target_logprobs,
    response_logprobs,
    response_scores,
)
from turnstream_server.models.packed import enable_packing
from turnstream_server.trainer.settings import Layout

if TYPE_CHECKING:
    from turnstream_server.models.adapters import Adapter

_Value = TypeVar("_Value")

Turns = Generator[None, None, _Value]
"""Work with pauses, and its result."""

TrainedRows = LeftPaddedTensors | PackedTensors
"""The rows of a micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Makes the forward passes of one policy.

    Attributes:
        model: the policy.
        adapter: adapter of the model that is the policy; None if the whole model is.
        reference: policy that a KL is measured to; None with an adapter takes the base model.
        layout, dtype, temperature: as for `Engine`.
    """

    model: PreTrainedModel
    adapter: Adapter | None
    reference: PreTrainedModel | None
    layout: Layout
    dtype: torch.dtype
    temperature: float

    def prepare(self) -> None:
        """Prepare the models for their layout."""
        if self.layout == "packed":
            with self._autocast():
                enable_packing(self.model)
                if self.reference is not None:
                    enable_packing(self.reference)

    def activate(self) -> None:
        """Make the adapter that of the next passes."""
        if self.adapter is not None:
            self.adapter.activate()

    def micro_batches(self, mini_batch: PulledMiniBatch) -> list[TrainedRows]:
        """Return the rows of each pass over a mini-batch."""
        if self.layout == "packed":
            return [*mini_batch.to_torch_packed(self.model.device)]
        return [*mini_batch.to_torch(self.model.device).micro_batches()]

    def logprobs(self, part: TrainedRows) -> Tensor:
        """Return the log-probabilities of the trained tokens, float32 (B, R); 0 elsewhere."""
        return self._logprobs(self.model, part)

    def logprobs_and_entropies(self, part: TrainedRows) -> tuple[Tensor, Tensor]:
        """Return `logprobs`, and the entropies of the policy at the same tokens, in nats."""
        with self._autocast():
            return response_scores(
                self.model, part, mask_BR=part.trained_tokens, temperature=self.temperature
            )

    def reference_logprobs(self, part: TrainedRows) -> Tensor:
        """Return the `logprobs` of the reference."""
        if self.reference is not None:
            return self._logprobs(self.reference, part)
        assert self.adapter is not None
        with self.adapter.off():
            return self._logprobs(self.model, part)

    def target_logprobs(self, part: OperationTensors) -> Tensor:
        """Return the log-probabilities of the targets of operation rows, float32 (N, K)."""
        find = packed_target_logprobs if self.layout == "packed" else padded_target_logprobs
        with self._autocast():
            return find(self.model, part)

    def _logprobs(self, model: PreTrainedModel, part: TrainedRows) -> Tensor:
        with self._autocast():
            return response_logprobs(
                model, part, mask_BR=part.trained_tokens, temperature=self.temperature
            )

    def _autocast(self) -> torch.autocast:
        is_lower = self.dtype != torch.float32
        return torch.autocast(self.model.device.type, dtype=self.dtype, enabled=is_lower)


def last_value(turns: Turns[_Value]) -> _Value:
    """Run work without its pauses, and return its result.

    >>> def work():
    ...     yield
    ...     return 7
    >>> last_value(work())
    7
    """
    while True:
        try:
            next(turns)
        except StopIteration as end:
            return end.value


Score = Callable[[OperationTensors], Tensor]
"""Takes the rows of a pass, returns the log-probabilities of their targets, float32 (N, K)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationReport:
    """Results of the real rows of this rank, by row id. `sums_by_request` adds up the losses.

    Attributes:
        losses: sum over the positions of the row.
        logprobs: log-probability of each target, float32 in their shape, before the next step.
    """

    losses: dict[int, float] = field(default_factory=dict[int, float])
    logprobs: dict[int, NDArray[np.float32]] = field(default_factory=dict[int, NDArray[Any]])


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationLoss:
    """A loss of operations.

    Attributes:
        name: a name of `batching.rows.operations.LOSS_SETTINGS`.
        settings: those that differ from the defaults.
    """

    name: str
    settings: Mapping[str, float] = field(default_factory=dict[str, float])


def run_passes(
    mini_batch: MiniBatch,
    score: Score,
    *,
    loss: OperationLoss,
    device: torch.device,
    after_pass: Callable[[Tensor], None],
) -> OperationReport:
    """Return the results of all passes; `after_pass` receives the summed loss of each."""
    report = OperationReport()
    for part in operation_tensors(mini_batch, device=device):
        current_NK = score(part)
        losses_N = operation_loss(current_NK, part, loss=loss.name, settings=loss.settings)
        after_pass(losses_N.sum())
        report.losses.update(part.row_sums(losses_N))
        report.logprobs.update(part.target_values(current_NK))
    return report
