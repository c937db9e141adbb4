"""Statistics of the loss and of the update of one mini-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LossReport:
    """Statistics of the loss of one mini-batch.

    Attributes:
        loss: loss of the whole mini-batch.
        num_recomputed_rows: rows without behaviour log-probabilities.
        ratio, kl, clipped_share, logprob: as in `trainer.objectives.statistics`.
        statistics: all further statistics of that module.
    """

    loss: float
    num_recomputed_rows: int
    ratio: float
    kl: float
    clipped_share: float
    logprob: float
    statistics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport(LossReport):
    """Statistics of one optimizer update: those of its loss, and of `StepReport`.

    Attributes:
        optimizer_s: seconds of the sum over ranks, of clipping and of the optimizer.
    """

    gradient_norm: float
    learning_rate: float
    skip_reason: str
    optimizer_s: float = field(compare=False)

    @property
    def is_applied(self) -> bool:
        """Whether the weights have changed."""
        return not self.skip_reason
