"""The metrics of a step, over all its mini-batches.

- `loss`, `reward_mean`: means over updates, and over the trajectories that have a reward.
- `ratio`, `kl`, `clipped_share`, `logprob`, and the other statistics of the objective as
  `trainer.objectives.statistics` lists them: means over the trained tokens. The KL coefficient is
  that of the last update, and `logprob_gap_max` the largest.
- `value_loss`, `value_clipped_share`: means over the trained tokens. `critic_gradient_norm` is the
  largest. `value_mean`, `return_mean` and `explained_variance` are those of the step.
- `oldest_version`, `newest_version`: range over the trained tokens.
- Counts are sums. `gradient_norm` is the largest, `learning_rate` the last update's.
- `skip_reasons`: causes of skipped updates.
- `figures`: as `turnstream batch --json` shows them.

With several epochs, rows and trajectories count once, updates in each epoch. With several ranks,
rows and tokens are those of all ranks. `declarations.py` declares each metric, with unit and
meaning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from turnstream.records.tag_statistics import shown_figures
from turnstream.types import MiniBatchInfo, Rows


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


_MAXIMA: Final = {"logprob_gap_max", "critic_gradient_norm"}
_LAST: Final = {"kl_coefficient", "total_skipped_critic_updates"}


class Update(NamedTuple):
    """One optimizer update, on this rank.

    Attributes:
        info: the one of its mini-batch.
        report: statistics of the update, over all ranks.
        rewards: one per trajectory; NaN where it has none.
        num_tokens: tokens of the rows.
        num_positions: positions of the rows in the layout of the trainer.
        squared_lengths: sum of the squares of the lengths of the rows.
    """

    info: MiniBatchInfo
    report: UpdateReport
    rewards: list[float]
    num_tokens: int
    num_positions: int
    squared_lengths: int
    epoch: int = 0


class StepShare(NamedTuple):
    """Numbers of one rank's share of a step, in the first epoch.

    Attributes:
        rewards: one per trajectory whose last row is in the share; NaN where it has none.
        num_rows, num_tokens, num_positions: without inert rows; positions by the used layout.
        pulled: `Step.metrics` of the rank.
        cpu_s: CPU seconds of the rank.
    """

    rewards: list[float]
    num_inert_rows: int
    num_rows: int
    num_tokens: int
    num_positions: int
    pulled: dict[str, float]
    cpu_s: float


def step_share(updates: Sequence[Update], *, pulled: dict[str, float], cpu_s: float) -> StepShare:
    """Return the numbers of a share from the updates of its rank."""
    first = [update for update in updates if update.epoch == 0]
    return StepShare(
        rewards=[reward for update in first for reward in update.rewards],
        num_inert_rows=sum(update.info.num_inert_rows for update in first),
        num_rows=sum(update.info.num_real_rows for update in first),
        num_tokens=sum(update.num_tokens for update in first),
        num_positions=sum(update.num_positions for update in first),
        pulled=pulled,
        cpu_s=cpu_s,
    )


def pulled_metrics(shares: Sequence[StepShare]) -> dict[str, float]:
    """Return the numbers of `Step.metrics` over all ranks; `wait_s` is that of the first rank.

    The padding share is that of the layout in use.
    """
    num_tokens = sum(each.num_tokens for each in shares)
    num_positions = sum(each.num_positions for each in shares)
    merged = sum(each.pulled["merge_ratio"] * each.num_tokens for each in shares)
    num_masked = sum(each.pulled["masked_share"] * each.num_tokens for each in shares)
    return {
        **shares[0].pulled,
        "num_rows": sum(each.num_rows for each in shares),
        "num_tokens": num_tokens,
        "padding_share": 1 - num_tokens / num_positions if num_positions else 0.0,
        "merge_ratio": merged / num_tokens if num_tokens else 1.0,
        "masked_share": num_masked / num_tokens if num_tokens else 0.0,
    }


def step_metrics(updates: Sequence[Update], shares: Sequence[StepShare]) -> dict[str, Any]:
    """Return the metrics of the updates of a step, from the shares of all ranks."""
    reports = [update.report for update in updates]
    infos = [update.info for update in updates]
    first = [update for update in updates if update.epoch == 0]
    rewards = [reward for share in shares for reward in share.rewards]
    newest = [info.newest_version for info in infos if info.newest_version is not None]
    oldest = [info.oldest_version for info in infos if info.oldest_version is not None]
    trained = [info.denominators.num_tokens for info in infos]
    measured = [report.statistics for report in reports]
    means = {
        name: sum(each[name] * n for each, n in zip(measured, trained, strict=True))
        / max(1, sum(trained))
        for name in measured[0]
    }
    return {
        **pulled_metrics(shares),
        "loss": _mean([report.loss for report in reports]),
        "reward_mean": _mean([reward for reward in rewards if not math.isnan(reward)]),
        "num_trajectories": len(rewards),
        "num_inert_rows": sum(share.num_inert_rows for share in shares),
        "num_recomputed_rows": sum(update.report.num_recomputed_rows for update in first),
        "oldest_version": min(oldest, default=None),
        "newest_version": max(newest, default=None),
        **means,
        **{name: max(each[name] for each in measured) for name in _MAXIMA & means.keys()},
        **{name: measured[-1][name] for name in _LAST & means.keys()},
        "gradient_norm": max(report.gradient_norm for report in reports),
        "learning_rate": reports[-1].learning_rate,
        "num_skipped_updates": sum(not report.is_applied for report in reports),
        "skip_reasons": [report.skip_reason for report in reports if not report.is_applied],
        "figures": shown_figures(infos[0].figures),
    }


def trajectory_rewards(rows: Rows) -> list[float]:
    """Return one reward per trajectory, that of its last row; NaN where it has none."""
    return np.asarray(rows.reward)[rows.is_last & ~rows.is_padding].tolist()


def squared_lengths(rows: Rows) -> int:
    """Return the sum of the squares of the lengths of the real rows."""
    return int((np.asarray(rows.input_ids.lengths)[~rows.is_padding].astype(np.int64) ** 2).sum())


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
