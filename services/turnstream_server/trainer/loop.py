"""The training loop: batches in, optimizer updates, weights and checkpoints out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

from turnstream.batching.config import BatchingConfig
from turnstream.types import RecoveryToken
from turnstream.worker.mini_batch import PulledMiniBatch
from turnstream_server.failpoints import reach
from turnstream_server.trainer.checkpoint import Checkpoints
from turnstream_server.trainer.config import TrainerConfig
from turnstream_server.trainer.dump import RowDump
from turnstream_server.trainer.engine import Engine
from turnstream_server.trainer.metrics import MetricsFile, UpdateFigures, step_figures
from turnstream_server.trainer.weights import WeightsFolder


class Batches(Protocol):
    """What the loop needs of `turnstream.worker.BatchStream`."""

    config: BatchingConfig
    newest_version: int

    def __iter__(self) -> Iterator[PulledMiniBatch]: ...

    def stepped(self) -> RecoveryToken:
        """Acknowledge the batch whose last mini-batch was yielded."""
        ...

    def committed(self, token: RecoveryToken) -> None:
        """Say that the checkpoint with this token is on disk."""
        ...

    def announce_version(self, version: int, *, step: int, weights_uri: str) -> None:
        """Tell generators of new weights."""
        ...


class Trainer:
    """One trainer at work on one run.

    Args:
        engine: with the weights of the last checkpoint, or the first ones.
        batches: from the step behind these weights on.
        config: of the process.
        checkpoints: where they are kept.
    """

    def __init__(
        self, engine: Engine, batches: Batches, *, config: TrainerConfig, checkpoints: Checkpoints
    ) -> None:
        self._engine = engine
        self._batches = batches
        self._config = config
        self._checkpoints = checkpoints
        self._weights = WeightsFolder(config.folder / "weights", num_retained=config.retain_weights)
        self._metrics = MetricsFile(config.folder / "metrics.jsonl")
        self._dump = None if config.dump_folder is None else RowDump(config.dump_folder)
        self._clock = _Clock()
        self._weights.clean()

    def train(self, *, from_step: int) -> None:
        """Train until the run ends or `max_steps` is reached.

        Args:
            from_step: the step after which the engine's weights were made; 0 before the first.
        """
        aggregation = self._batches.config.aggregation
        token: RecoveryToken | None = None
        updates: list[UpdateFigures] = []
        self._publish(from_step)
        for mini_batch in self._batches:
            self._clock.lap("wait_s")
            report = self._engine.update(mini_batch, aggregation=aggregation)
            updates.append(UpdateFigures.of(mini_batch, report))
            if self._dump is not None:
                self._dump.write(mini_batch)
            self._clock.lap("update_s")
            if mini_batch.is_last:
                token = self._finish_step(updates)
                updates = []
                if token.step == self._config.max_steps:
                    break
        if token is not None and token.step % self._config.checkpoint_every:
            self._save(token)

    def _finish_step(self, updates: list[UpdateFigures]) -> RecoveryToken:
        """Acknowledge the step, give its weights away, and save them when it is time to."""
        reach("train.after_update")
        token = self._batches.stepped()
        reach("train.after_stepped")
        version = self._publish(token.step)
        self._report(updates, version=version)
        if token.step % self._config.checkpoint_every == 0:
            self._save(token)
        return token

    def _publish(self, step: int) -> int:
        """Give the weights a version of their own and announce it."""
        version = self._batches.newest_version + 1
        published = self._weights.publish(self._engine.model, version=version)
        self._batches.announce_version(version, step=step, weights_uri=published.uri)
        self._clock.lap("publish_s")
        return version

    def _save(self, token: RecoveryToken) -> None:
        """Checkpoint, and only when it is on disk say so."""
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
    """Where the seconds went since the last `take`."""

    def __init__(self) -> None:
        self._start_s = self._last_s = time.monotonic()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Everything since the lap before belongs to `name`."""
        now_s = time.monotonic()
        self._laps[name] = self._laps.get(name, 0.0) + now_s - self._last_s
        self._last_s = now_s

    def take(self) -> dict[str, float]:
        """Seconds by name, and since the start; the names begin again at nothing."""
        laps = {name: round(seconds, 6) for name, seconds in self._laps.items()}
        self._laps = {}
        return {**laps, "elapsed_s": round(self._last_s - self._start_s, 6)}
