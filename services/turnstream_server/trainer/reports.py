"""Statistics of the loss, of the optimizer step and of the update of one mini-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class LossReport:
    """Statistics of the loss of one mini-batch.

    Attributes:
        loss: loss of the whole mini-batch.
        num_recomputed_rows: rows without behaviour log-probabilities.
        statistics: those of `trainer.objectives.statistics`.
    """

    loss: float
    num_recomputed_rows: int
    statistics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Result of one optimizer step.

    Attributes:
        gradient_norm: before clipping.
        learning_rate: rate of this step.
        skip_reason: cause of a skipped step, which changed no weight; "" for an applied one.
    """

    gradient_norm: float
    learning_rate: float
    skip_reason: str = ""

    @property
    def is_applied(self) -> bool:
        """Whether the weights have changed."""
        return not self.skip_reason


@dataclass(frozen=True, kw_only=True)
class UpdateReport(LossReport, StepReport):
    """Statistics of one optimizer update.

    Attributes:
        optimizer_s: seconds of the sum over ranks, of clipping and of the optimizer.
    """

    optimizer_s: float = field(compare=False)
