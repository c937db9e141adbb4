"""Metrics of a training: one JSON object per step, a line each.

The keys of a line, over all mini-batches of the step. With several epochs, rows and trajectories
count once, updates in each epoch:

- `step`, `version`: the batch, and the weights after it.
- The metrics of `turnstream.worker.steps.Step`: `num_groups`, `num_trained_tokens`, `staleness`,
  `merge_ratio`, `num_rows`, `num_tokens`, `padding_share` and `wait_s`.
- `loss`: mean of the losses of the updates; each is averaged by the run's `aggregation`.
- `reward_mean`, `num_trajectories`: mean and number; null if no trajectory has a reward.
- `num_inert_rows`, `num_recomputed_rows`: sums.
- `oldest_version`, `newest_version`: range over the trained tokens.
- `ratio`, `kl`, `clipped_share`, `logprob`, and the other statistics of the objective as
  `trainer.objective_statistics` lists them: means over the trained tokens. The KL coefficient is
  that of the last update, and `logprob_gap_max` the largest.
- `gradient_norm`: the largest. `learning_rate`: the last update's.
- `num_updates`: since the start of the run.
- `num_skipped_updates`, `skip_reasons`: number and causes in this step. `total_skipped_updates`:
  since the start of the run.
- `figures`: tags and metrics of the trajectories, as `turnstream batch --json` shows them.
- `num_servers_behind`: inference servers without the newest weights. `num_failed_pushes`: failed
  attempts since the start of the trainer.
- `update_s`, `publish_s` (weights), `elapsed_s` (since the start of the trainer): seconds.
  `update_s` is without the forward pass of `--proximal recompute`.

The trainer is a single rank: its rows are those of the whole mini-batch. After a restart the steps
after the checkpoint appear again; the later line of a step counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from turnstream.records.tag_statistics import shown_figures
from turnstream.types import MiniBatchInfo, Rows
from turnstream_server.trainer.engine import UpdateReport

_MAXIMA: Final = {"logprob_gap_max"}
_LAST: Final = {"kl_coefficient"}


class Update(NamedTuple):
    """One optimizer update: its mini-batch and its trajectories' rewards, and a report."""

    info: MiniBatchInfo
    report: UpdateReport
    rewards: list[float]
    update_s: float
    epoch: int = 0


def step_metrics(updates: Sequence[Update]) -> dict[str, Any]:
    """Return the metrics of the updates of a step, by the keys of this module."""
    reports = [update.report for update in updates]
    infos = [update.info for update in updates]
    first = [update for update in updates if update.epoch == 0]
    rewards = [reward for update in first for reward in update.rewards]
    newest = [info.newest_version for info in infos if info.newest_version is not None]
    oldest = [info.oldest_version for info in infos if info.oldest_version is not None]
    trained = [info.denominators.num_tokens for info in infos]
    measured = [
        {name: getattr(r, name) for name in ("ratio", "kl", "clipped_share", "logprob")}
        | dict(r.statistics)
        for r in reports
    ]
    means = {
        name: sum(each[name] * n for each, n in zip(measured, trained, strict=True))
        / max(1, sum(trained))
        for name in measured[0]
    }
    return {
        "loss": _mean([report.loss for report in reports]),
        "reward_mean": _mean([reward for reward in rewards if not math.isnan(reward)]),
        "num_trajectories": len(rewards),
        "num_inert_rows": sum(update.info.num_inert_rows for update in first),
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
        "update_s": sum(update.update_s for update in updates),
    }


class MetricsFile:
    """Appends lines to a file; a line that a crash interrupted is closed, not continued."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.read_bytes().endswith(b"\n"):
            self._append("\n")

    def write(self, metrics: dict[str, Any]) -> None:
        """Append one line; numbers that are not finite become null."""
        finite = {name: _finite(value) for name, value in metrics.items()}
        self._append(json.dumps(finite) + "\n")

    def _append(self, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)


def trajectory_rewards(rows: Rows) -> list[float]:
    """Return one reward per trajectory, that of its last row; NaN where it has none."""
    return np.asarray(rows.reward)[rows.is_last & ~rows.is_padding].tolist()


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
