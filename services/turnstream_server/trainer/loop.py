"""The training loop: batches in, optimizer updates, weights and checkpoints out."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from turnstream.types import MiniBatch, Ragged, RecoveryToken
from turnstream.worker import BatchStream
from turnstream_server.failpoints import reach
from turnstream_server.trainer.checkpoint import Checkpoints, WeightsFolder
from turnstream_server.trainer.config import TrainerConfig
from turnstream_server.trainer.engine import Engine
from turnstream_server.trainer.metrics import MetricsFile, UpdateFigures, step_figures


class Trainer:
    """Trains one run; `batches` begin with the step after the weights of `engine`."""

    def __init__(
        self,
        engine: Engine,
        batches: BatchStream,
        *,
        config: TrainerConfig,
        checkpoints: Checkpoints,
    ) -> None:
        self._engine = engine
        self._batches = batches
        self._config = config
        self._checkpoints = checkpoints
        self._weights = WeightsFolder(config.folder / "weights", num_retained=config.retain_weights)
        self._metrics = MetricsFile(config.folder / "metrics.jsonl")
        self._clock = _Clock()

    def train(self, *, from_step: int) -> None:
        """Train until the run ends or `max_steps` is reached.

        `from_step` is the last step in the engine's weights; 0 before the first.
        """
        aggregation = self._batches.config.aggregation
        token: RecoveryToken | None = None
        updates: list[UpdateFigures] = []
        self._publish(from_step)
        for mini_batch in self._batches:
            self._clock.lap("wait_s")
            report = self._engine.update(mini_batch, aggregation=aggregation)
            updates.append(UpdateFigures.of(mini_batch, report))
            if self._config.dump_folder is not None:
                dump_rows(mini_batch, self._config.dump_folder)
            self._clock.lap("update_s")
            if mini_batch.is_last:
                token = self._finish_step(updates)
                updates = []
                if token.step == self._config.max_steps:
                    break
        if token is not None and token.step % self._config.checkpoint_every:
            self._save(token)

    def _finish_step(self, updates: list[UpdateFigures]) -> RecoveryToken:
        """Acknowledge the step, publish its weights, and save them if a checkpoint is due."""
        reach("train.after_update")
        token = self._batches.stepped()
        reach("train.after_stepped")
        version = self._publish(token.step)
        self._report(updates, version=version)
        if token.step % self._config.checkpoint_every == 0:
            self._save(token)
        return token

    def _publish(self, step: int) -> int:
        """Publish the weights as a new version and return it."""
        version = self._batches.newest_version + 1
        uri = self._weights.publish(self._engine.model, version=version)
        self._batches.announce_version(version, step=step, weights_uri=uri)
        self._clock.lap("publish_s")
        return version

    def _save(self, token: RecoveryToken) -> None:
        """Write a checkpoint, and commit it once it is on disk."""
        self._checkpoints.save(self._engine, token)
        reach("checkpoint.before_committed")
        self._batches.committed(token)
        reach("checkpoint.after_committed")
        self._checkpoints.prune()

    def _report(self, updates: list[UpdateFigures], *, version: int) -> None:
        figures = step_figures(updates)
        self._metrics.write(
            {
                **figures,
                "version": version,
                "num_updates": self._engine.num_updates,
                **self._clock.take(),
            }
        )


class _Clock:
    """Seconds of each phase since the last `take`."""

    def __init__(self) -> None:
        self._start_s = self._last_s = time.monotonic()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Add the time since the lap before to `name`."""
        now_s = time.monotonic()
        self._laps[name] = self._laps.get(name, 0.0) + now_s - self._last_s
        self._last_s = now_s

    def take(self) -> dict[str, float]:
        """Return name to seconds, and the seconds since the start; reset the names."""
        laps = {name: round(seconds, 6) for name, seconds in self._laps.items()}
        self._laps = {}
        return {**laps, "elapsed_s": round(self._last_s - self._start_s, 6)}


def dump_rows(mini_batch: MiniBatch, folder: Path) -> None:
    """Write the real rows of a mini-batch to `step-<step>-<mini-batch>.npz`.

    With B rows: `row_id`, `trajectory_id`, `prompt_length`, `reward` and `advantage` (B,), and
    `input_ids` with `row_offsets` (B + 1,). On the responses: `loss_mask`, and `logprobs` if the
    rows have them, with `response_offsets` (B + 1,). The same mini-batch replaces its file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows, info = mini_batch.rows, mini_batch.info
    real_B = np.flatnonzero(~rows.is_padding)
    responses = _picked(rows.loss_mask, real_B)
    tokens = _picked(rows.input_ids, real_B)
    columns = {
        "row_id": rows.row_id[real_B],
        "trajectory_id": np.array([rows.trajectory_id[row] for row in real_B.tolist()]),
        "prompt_length": rows.prompt_length[real_B],
        "reward": rows.reward[real_B],
        "advantage": rows.advantage[real_B],
        "input_ids": tokens.values,
        "row_offsets": tokens.offsets,
        "loss_mask": responses.values,
        "response_offsets": responses.offsets,
    }
    if rows.logprobs is not None:
        columns["logprobs"] = _picked(rows.logprobs, real_B).values
    np.savez(folder / f"step-{info.step:06}-{info.mini_batch}.npz", **columns)


def _picked(column: Ragged, rows_B: np.ndarray) -> Ragged:
    values = column.values
    return Ragged.from_rows([column[row] for row in rows_B.tolist()], values.dtype.type)
