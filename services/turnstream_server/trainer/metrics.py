"""Metrics of a training: one JSON object per step, a line each.

The keys of a line, over all mini-batches of the step:

- `step`, `version`: the batch, and the weights after it.
- `loss`: mean of the losses of the updates; each is averaged by the run's `aggregation`.
- `reward_mean`, `num_trajectories`: mean and number; null if no trajectory has a reward.
- `num_groups`: groups with a trained token.
- `num_tokens`: tokens of the real rows. `num_trained_tokens`: those with a loss mask of 1.
- `num_real_rows`, `num_inert_rows`, `num_recomputed_rows`: sums.
- `padding_share`: 1 - `num_tokens` / positions, where the positions of a mini-batch are its real
  rows x its width in the left-padded layout. Inert rows are not counted.
- `merge_ratio`: tokens of the separate turns / `num_tokens`.
- `oldest_version`, `newest_version`: range over the trained tokens.
- `ratio`, `kl`, `clipped_share`, `logprob`: means over the trained tokens.
- `gradient_norm`: the largest. `learning_rate`: the last update's.
- `num_updates`: since the start of the run. `num_skipped_updates`: in this step.
- `figures`: tags and metrics of the trajectories, as `turnstream batch --json` shows them.
- `wait_s` (for data), `update_s`, `publish_s` (weights of the step before), `elapsed_s` (since the
  start of the trainer).

The trainer is a single rank: its rows are those of the whole mini-batch. After a restart the steps
after the checkpoint appear again; the later line of a step counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from turnstream.records.tag_statistics import shown_figures
from turnstream.types import MiniBatchInfo, Rows
from turnstream.worker.mini_batch import PulledMiniBatch, step_totals
from turnstream_server.trainer.engine import UpdateReport


class UpdateFigures(NamedTuple):
    """The numbers of one mini-batch and its update, for the metrics."""

    info: MiniBatchInfo
    report: UpdateReport
    num_tokens: int
    rewards: list[float]

    @classmethod
    def of(cls, mini_batch: PulledMiniBatch, report: UpdateReport) -> UpdateFigures:
        """Return the numbers of a mini-batch and of the report of its update."""
        rewards = _trajectory_rewards(mini_batch.rows)
        return cls(mini_batch.info, report, mini_batch.num_tokens, rewards)


def step_figures(updates: Sequence[UpdateFigures]) -> dict[str, Any]:
    """Return the metrics of a batch from those of its mini-batches, by the keys of this module."""
    reports = [update.report for update in updates]
    infos = [update.info for update in updates]
    rewards = [reward for update in updates for reward in update.rewards]
    trained = [report.num_trained_tokens for report in reports]
    versions = [info.newest_version for info in infos if info.newest_version is not None]
    oldest = [info.oldest_version for info in infos if info.oldest_version is not None]
    totals = step_totals(infos, [update.num_tokens for update in updates])
    return {
        "step": infos[-1].step,
        "loss": _mean([report.loss for report in reports]),
        "reward_mean": _mean([reward for reward in rewards if not math.isnan(reward)]),
        "num_trajectories": len(rewards),
        "num_real_rows": totals.pop("num_rows"),
        **totals,
        "num_inert_rows": sum(info.num_inert_rows for info in infos),
        "num_recomputed_rows": sum(report.num_recomputed_rows for report in reports),
        "oldest_version": min(oldest, default=None),
        "newest_version": max(versions, default=None),
        **{
            name: _weighted([getattr(report, name) for report in reports], trained)
            for name in ("ratio", "kl", "clipped_share", "logprob")
        },
        "gradient_norm": max(report.gradient_norm for report in reports),
        "learning_rate": reports[-1].learning_rate,
        "num_skipped_updates": sum(not report.is_applied for report in reports),
        "figures": shown_figures(infos[0].figures),
    }


class MetricsFile:
    """Appends lines to a file; a line that a crash interrupted is closed, not continued."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.read_bytes().endswith(b"\n"):
            self._append("\n")

    def write(self, figures: dict[str, Any]) -> None:
        """Append one line; numbers that are not finite become null."""
        finite = {name: _finite(value) for name, value in figures.items()}
        self._append(json.dumps(finite) + "\n")

    def _append(self, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)


def _trajectory_rewards(rows: Rows) -> list[float]:
    """Return one reward per trajectory, that of its last row; NaN where it has none."""
    counted_B = rows.is_last & ~rows.is_padding
    return np.asarray(rows.reward)[counted_B].tolist()


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _weighted(values: Sequence[float], weights: Sequence[int]) -> float:
    total = sum(weights)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / total if total else 0.0


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
