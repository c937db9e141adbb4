"""The runs that hosted models train on, on one rank: a trainer session's stream for each.

The engine of a hosted model trains their mini-batches. The result is that of a training call.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from turnstream.batching.rows.operations import LOSS_SETTINGS
from turnstream.errors import BatchingError, EndOfRunError, NotReadyError, RejectedError
from turnstream.types import MiniBatchInfo
from turnstream.worker import BatchStream, PulledMiniBatch
from turnstream_server.operations.contents import ForwardBackwardRun
from turnstream_server.operations.results import TrainingOutput
from turnstream_server.trainer.engine import Engine
from turnstream_server.trainer.metrics import trajectory_rewards
from turnstream_server.trainer.objectives.config import ObjectiveConfig
from turnstream_server.trainer.objectives.objective import Objective
from turnstream_server.trainer.objectives.parameters import PpoClip
from turnstream_server.trainer.passes import Turns
from turnstream_server.trainer.ranks import Ranks

OpenStream = Callable[[str, str, str], BatchStream]
"""Takes the id of a run, a recovery token ("" for none) and the name of a trainer session.

Returns the stream of this rank."""


class RunRefusedError(BatchingError):
    """A run refuses a trainer session, or is closed and trained to its end (`is_finished`)."""

    def __init__(self, message: str, is_finished: bool = False) -> None:
        super().__init__(message, is_finished)
        self.message = message
        self.is_finished = is_finished

    def __str__(self) -> str:
        return self.message


class _Key(NamedTuple):
    model_id: str
    run: str


@dataclass(slots=True)
class _Session:
    """One rank's part of a trainer session; `stepped` has the newest step and its token."""

    stream: BatchStream
    pulled: PulledMiniBatch | None = None
    last: MiniBatchInfo | None = None
    stepped: tuple[int, str] = (0, "")


class RunStreams:
    """The streams of one rank, by model and run: the part of a `Host` that reads runs.

    All calls are safe to repeat after an error. Ranks that had no error keep what they have.
    """

    def __init__(self, open_stream: OpenStream | None) -> None:
        self._open_stream = open_stream
        self._sessions: dict[_Key, _Session] = {}

    def open_run(self, model_id: str, run: str, *, token: str, session: str) -> None:
        """Begin a trainer session after the step of a token; it replaces an older one."""
        if self._open_stream is None:
            raise RunRefusedError(f"run {run!r}: this worker has no batcher")
        key = _Key(model_id, run)
        self._close_stream(key)
        with _refusing(run):
            self._sessions[key] = _Session(self._open_stream(run, token, session))

    def _pull(self, model_id: str, run: str, *, timeout_s: float) -> PulledMiniBatch:
        """Return the next mini-batch, which stays the next one until it is taken."""
        own = self._sessions[_Key(model_id, run)]
        if own.pulled is None:
            with _refusing(run):
                own.pulled = own.stream.poll(timeout_s=timeout_s)
        if own.pulled is None:
            reason = own.stream.statistics().waiting_for or "it was asked for"
            raise NotReadyError(f"the next mini-batch of run {run!r} has not come: {reason}")
        return own.pulled

    def drop_run(self, model_id: str, run: str) -> None:
        """Take the mini-batch that was pulled, and drop it."""
        self._take(model_id, run)

    def _take(self, model_id: str, run: str) -> PulledMiniBatch:
        """Return the mini-batch that was pulled; the next pull returns the one after it."""
        own = self._sessions[_Key(model_id, run)]
        assert own.pulled is not None
        mini_batch, own.pulled = own.pulled, None
        own.last = mini_batch.info
        return mini_batch

    def step_run(self, model_id: str, run: str) -> str:
        """Acknowledge the step whose last mini-batch was taken; return its recovery token."""
        own = self._sessions[_Key(model_id, run)]
        assert own.last is not None
        if own.stepped[0] != own.last.step:
            with _refusing(run):
                own.stepped = own.last.step, str(own.stream.stepped())
        return own.stepped[1]

    def commit_run(self, model_id: str, run: str, *, token: str) -> None:
        """Acknowledge that a durable checkpoint with this token is on disk."""
        with _refusing(run):
            self._sessions[_Key(model_id, run)].stream.committed(token)

    def close_runs(self, model_id: str) -> None:
        """Close the streams of a model; their sessions stay until another one begins."""
        for key in [*self._sessions]:
            if key.model_id == model_id:
                self._close_stream(key)

    def close(self) -> None:
        """Close all streams."""
        for key in [*self._sessions]:
            self._close_stream(key)

    def _close_stream(self, key: _Key) -> None:
        own = self._sessions.pop(key, None)
        if own is not None:
            own.stream.close()


@contextlib.contextmanager
def _refusing(run: str) -> Iterator[None]:
    """Raise refusals as RunRefusedError: they must not be taken for those of the log of a model."""
    try:
        yield
    except EndOfRunError as error:
        raise RunRefusedError(f"run {run!r} is finished: {error}", True) from error
    except RejectedError as error:
        raise RunRefusedError(f"run {run!r}: {error}") from error


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
