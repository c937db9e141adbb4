"""Forward passes of a policy and of its reference, in one layout and type.

Work pauses between them, so that the passes of several models take turns.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnstream.worker import PulledMiniBatch
from turnstream.worker.layouts import PackedTensors
from turnstream.worker.operation_tensors import OperationTensors
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
