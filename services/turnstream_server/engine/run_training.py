"""One mini-batch of a run in the engine of a hosted model, and its result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from turnstream.batching.rows.operations import LOSS_SETTINGS
from turnstream.errors import BatchingError
from turnstream.worker import PulledMiniBatch
from turnstream_server.operations.contents import ForwardBackwardRun
from turnstream_server.operations.results import TrainingOutput
from turnstream_server.trainer.engine import Engine
from turnstream_server.trainer.metrics import trajectory_rewards
from turnstream_server.trainer.objectives.config import ObjectiveConfig
from turnstream_server.trainer.objectives.objective import Objective
from turnstream_server.trainer.objectives.parameters import PpoClip
from turnstream_server.trainer.passes import Turns
from turnstream_server.trainer.ranks import Ranks

_PLACEHOLDER: Final = np.zeros(1, np.float32)
"""Log-probabilities of the datum that a client sends in place of rows."""


class RunReport(NamedTuple):
    """Results of a mini-batch on one rank.

    Attributes:
        is_last: it is the last one of its step.
        metrics: those that are equal on all ranks, by `<name>:<reduction>`.
        rewards: one per trajectory whose last row is on this rank; NaN where it has none.
    """

    is_last: bool
    metrics: dict[str, float]
    rewards: list[float]


def objective_of(content: ForwardBackwardRun, ranks: Ranks) -> Objective:
    """Return the objective of a call. Thresholds are ratios, as 0.8 for a `clip_low` of 0.2."""
    settings = {**LOSS_SETTINGS[content.loss_fn], **content.settings}
    loss = PpoClip(
        clip_low=1.0 - settings["clip_low_threshold"],
        clip_high=settings["clip_high_threshold"] - 1.0,
    )
    return Objective(ObjectiveConfig(loss=loss), gather=ranks.gather)


def train_mini_batch(
    engine: Engine, mini_batch: PulledMiniBatch, content: ForwardBackwardRun, *, ranks: Ranks
) -> Turns[RunReport]:
    """Add the gradient of a mini-batch, averaged as its run is configured; pause between passes."""
    info = mini_batch.info
    assert info.aggregation is not None
    engine.use_objective(objective_of(content, ranks))
    report = yield from engine.forward_backward_turns(mini_batch, aggregation=info.aggregation)
    metrics = {
        "loss:sum": report.loss,
        "tokens:sum": float(info.denominators.num_tokens),
        "trajectories:sum": float(info.denominators.num_trajectories),
        "step:max": float(info.step),
        "padding_share:mean": info.padding_share,
        "clipped_share:mean": report.statistics["clipped_share"],
        "kl:mean": report.statistics["kl"],
    }
    return RunReport(info.is_last, metrics, trajectory_rewards(mini_batch.rows))


def run_output(reports: Sequence[RunReport]) -> TrainingOutput:
    """Return the result of a mini-batch from the reports of all ranks."""
    rewards = [each for report in reports for each in report.rewards if not math.isnan(each)]
    metrics = dict(reports[0].metrics)
    if rewards:
        metrics["reward:mean"] = math.fsum(rewards) / len(rewards)
    # JSON has no NaN. A loss that is no number is shown by the gradient of the optimizer step.
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return TrainingOutput([_PLACEHOLDER], {"loss:sum": 0.0, **finite})


def check_fits(mini_batch: PulledMiniBatch, *, context_length: int, vocab_size: int) -> None:
    """Raise BatchingError if the rows of a mini-batch do not fit the base model."""
    info = mini_batch.info
    place = f"run {info.run!r}, step {info.step}"
    if info.aggregation is None:
        raise BatchingError(f"{place}: its batch does not name an aggregation: plan it again")
    if info.width > context_length:
        limit = f"the context of the base model has {context_length}"
        raise BatchingError(f"{place}: a row has {info.width} tokens, {limit}")
    largest = max(info.pad_token_id, int(mini_batch.rows.input_ids.values.max(initial=0)))
    if largest >= vocab_size:
        limit = f"the base model has the ids 0 to {vocab_size - 1}"
        raise BatchingError(f"{place}: a token is {largest}, {limit}")
