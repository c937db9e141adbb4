"""Passes over the rows of Tinker-style operations: their log-probabilities and losses, by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnstream.types import MiniBatch
from turnstream.worker.operation_losses import operation_loss
from turnstream.worker.operation_tensors import OperationTensors, operation_tensors

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
