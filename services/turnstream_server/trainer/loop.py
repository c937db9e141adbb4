"""The training loop: batches in, optimizer updates, weights and checkpoints out."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from turnstream.batching.rows.assemble import take_rows
from turnstream.errors import InvalidConfigError
from turnstream.types import MiniBatch, RecoveryToken
from turnstream.worker.steps import Batches, PulledMiniBatch, Step
from turnstream_server.failpoints import failpoint
from turnstream_server.telemetry.tracing import span
from turnstream_server.trainer.checkpoint import Checkpoints
from turnstream_server.trainer.config import TrainerConfig
from turnstream_server.trainer.critic.config import require_critic_for
from turnstream_server.trainer.critic.critic import with_advantages
from turnstream_server.trainer.engine import Engine
from turnstream_server.trainer.metrics import (
    StepShare,
    Update,
    squared_lengths,
    step_metrics,
    step_share,
    trajectory_rewards,
)
from turnstream_server.trainer.publishing import WeightsAccess, WeightsPublisher
from turnstream_server.trainer.ranks import ONE_RANK, Ranks
from turnstream_server.trainer.reporting.sinks import Sinks, open_sinks
from turnstream_server.trainer.reporting.timing import DeviceUse, StepClock, rates
from turnstream_server.trainer.settings import Layout

logger = logging.getLogger(__name__)


class Trainer:
    """Trains one run; `batches` begin with the step after the weights of `engine`.

    Each rank has one. The first rank alone publishes weights and reports metrics.
    """

    def __init__(
        self,
        engine: Engine,
        batches: Batches,
        *,
        config: TrainerConfig,
        checkpoints: Checkpoints,
        ranks: Ranks = ONE_RANK,
        weights_access: WeightsAccess | None = None,
    ) -> None:
        require_critic_for(batches.config.estimator, config.critic_config)
        self._engine = engine
        self._batches = batches
        self._config = config
        self._checkpoints = checkpoints
        self._ranks = ranks
        self._publisher = WeightsPublisher(config, weights_access) if ranks.is_first else None
        self._layout: Layout = "packed" if config.layout == "packed" else "padded"
        self._device_use = DeviceUse(engine.model)
        self._clock = StepClock()

    def train(self, *, from_step: int) -> None:
        """Train until the run ends or `max_steps` is reached.

        `from_step` is the last step in the engine's weights; 0 before the first.
        """
        if self._publisher is None:
            self._publish(from_step)
            self._train_steps(Sinks([]))
            return
        with open_sinks(self._config, from_step=from_step) as sinks, self._publisher:
            self._publish(from_step)
            self._train_steps(sinks)

    def _train_steps(self, sinks: Sinks) -> None:
        step: Step | None = None
        self._clock.restart()
        for step in self._batches:
            with span("train step", run=self._batches.run, step=step.number):
                metrics = self._train_step(step)
            sinks.write(step.number, metrics)
            if self._publisher is not None:
                _log_step(self._batches.run, metrics)
            if step.number % self._config.checkpoint_every == 0:
                with self._clock.measure("checkpoint"):
                    self._save(step)
            if step.number == self._config.max_steps:
                break
        if step is not None and step.number % self._config.checkpoint_every:
            self._save(step)

    def _train_step(self, step: Step) -> dict[str, Any]:
        """Train a step, acknowledge it, publish its weights, and return its metrics."""
        mini_batches = step.mini_batches(
            epochs=self._config.epochs, shuffle_seed=self._config.shuffle_seed
        )
        updates = [self._update(*each) for each in self._scored(mini_batches)]
        failpoint("train.after_update")
        step.done()
        failpoint("train.after_stepped")
        pulled = step.metrics
        with self._clock.measure("publish"):
            published = self._publish(step.number)
        self._clock.add("wait", pulled["wait_s"])
        times = self._clock.lap()
        share = step_share(updates, pulled=pulled, cpu_s=times["cpu_s"])
        shares = self._ranks.gather(share)
        metrics = self._metrics(updates, shares, times=times)
        self._require_trained_tokens(step.number, metrics["masked_share"])
        return {"step": step.number, **metrics, **published}

    def _require_trained_tokens(self, step: int, masked_share: float) -> None:
        """Stop if most tokens are of trajectories that were cut off or failed."""
        limit = self._config.max_masked_share
        if masked_share > limit:
            raise InvalidConfigError(
                "--max-masked-share",
                f"step {step}: {masked_share:.1%} of the tokens are in masked trajectories, "
                f"allowed are {limit:.1%}; the checkpoint before the step is kept",
            )

    def _scored(
        self, mini_batches: Iterator[PulledMiniBatch]
    ) -> Iterator[tuple[PulledMiniBatch, list[Tensor] | None]]:
        """Yield the mini-batches of a step with old log-probabilities, and with advantages."""
        scored = self._engine.with_old_logprobs(mini_batches)
        if self._engine.critic is None:
            return scored
        return with_advantages(
            scored,
            critic=self._engine.critic,
            source=self._batches.config.reward_source,
            penalties=self._engine.token_penalties,
            ranks=self._ranks,
        )

    def _metrics(
        self, updates: list[Update], shares: list[StepShare], *, times: dict[str, float]
    ) -> dict[str, Any]:
        """Return the metrics of a step: times and device are those of this rank."""
        metrics = {
            **step_metrics(updates, shares),
            **times,
            "cpu_s": sum(share.cpu_s for share in shares),
            "num_updates": self._engine.num_updates,
            "total_skipped_updates": self._engine.num_skipped,
        }
        use = self._device_use.lap(
            num_tokens=sum(update.num_tokens for update in updates),
            squared_lengths=sum(update.squared_lengths for update in updates),
            step_s=metrics["step_s"],
        )
        return {**metrics, **rates(metrics), **use}

    def _update(self, mini_batch: PulledMiniBatch, old: list[Tensor] | None) -> Update:
        aggregation = self._batches.config.aggregation
        with self._clock.measure("forward_backward"):
            report = self._engine.update(mini_batch, aggregation=aggregation, old=old)
            if self._engine.critic is not None:
                of_critic = self._engine.critic.update(mini_batch)
                statistics = {**report.statistics, **of_critic}
                report = dataclasses.replace(report, statistics=statistics)
        self._clock.move(report.optimizer_s, source="forward_backward", target="optimizer")
        if self._config.dump_folder is not None and mini_batch.epoch == 0:
            dump_rows(mini_batch, self._config.dump_folder)
        rows = mini_batch.rows
        return Update(
            info=mini_batch.info,
            report=report,
            rewards=trajectory_rewards(rows),
            num_tokens=mini_batch.num_tokens,
            num_positions=mini_batch.num_positions(layout=self._layout),
            squared_lengths=squared_lengths(rows),
            epoch=mini_batch.epoch,
        )

    def _publish(self, step: int) -> dict[str, int]:
        """Publish the weights as a new version, and return its metrics on the first rank."""
        write = self._engine.gather_weights()
        if self._publisher is None:
            return {}
        version = self._batches.newest_version + 1
        uri = self._publisher.publish(write, version=version)
        self._batches.announce_version(version, step=step, weights_uri=uri)
        return {"version": version, **self._publisher.statistics()}

    def _save(self, step: Step) -> None:
        """Write a checkpoint, and commit it once it is on disk; no rank is ahead of the first."""
        self._checkpoints.save(self._engine, RecoveryToken.parse(step.done()))
        failpoint("checkpoint.before_committed")
        step.commit()
        failpoint("checkpoint.after_committed")
        self._checkpoints.prune()


def _log_step(run: str, metrics: Mapping[str, Any]) -> None:
    facts = {name: metrics.get(name) for name in ("step", "version", "loss", "reward_mean")}
    logger.info("trained a step", extra={"run": run, **facts})


def dump_rows(mini_batch: MiniBatch, folder: Path) -> None:
    """Write the real rows of a mini-batch to `step-<step>-<mini-batch>.npz`.

    With B rows: `row_id`, `trajectory_id`, `prompt_length`, `reward` and `advantage` (B,), and
    `input_ids` with `row_offsets` (B + 1,). On the responses: `loss_mask`, and `logprobs` and
    `advantages` if the rows have them, with `response_offsets` (B + 1,). The same mini-batch
    replaces its file. One of several ranks adds `-rank<rank>` to the name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    info = mini_batch.info
    rank = f"-rank{info.dp_rank}" if info.dp_world_size > 1 else ""
    rows = take_rows(mini_batch.rows, np.flatnonzero(~mini_batch.rows.is_padding).tolist())
    columns = {
        "row_id": rows.row_id,
        "trajectory_id": np.array(rows.trajectory_id),
        "prompt_length": rows.prompt_length,
        "reward": rows.reward,
        "advantage": rows.advantage,
        "input_ids": rows.input_ids.values,
        "row_offsets": rows.input_ids.offsets,
        "loss_mask": rows.loss_mask.values,
        "response_offsets": rows.loss_mask.offsets,
    }
    for name in ("logprobs", "advantages"):
        values = getattr(rows, name)
        if values is not None:
            columns[name] = values.values
    np.savez(folder / f"step-{info.step:06}-{info.mini_batch}{rank}.npz", **columns)
