"""One hosted model, as the first rank of its worker runs it.

The state of a model is that of its durable checkpoint, and the operations after it. So a model is
rebuilt from both: after a restart, and after an operation that has failed half-way.

A result is written after the operation has run. Operations that write a durable checkpoint
themselves (`create`, `load_weights`) keep their result in it: once the log names the checkpoint,
they are not run again.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Final

import redis

from turnstream.errors import (
    BatchingError,
    EndOfRunError,
    FencedError,
    RunNotFoundError,
    UnavailableError,
)
from turnstream_server.engine.checkpoints import DurableFolders, Saver, further_files
from turnstream_server.engine.host import Host, Lockstep
from turnstream_server.engine.options import EngineOptions
from turnstream_server.engine.trained_runs import REPLAY_S, RunSessionEndedError, TrainedRuns
from turnstream_server.engine.training import (
    PassError,
    leaves_gradient,
    run_optim_step,
    run_training,
)
from turnstream_server.failpoints import failpoint
from turnstream_server.operations.contents import (
    TRAINING_KINDS,
    CreateModel,
    ForwardBackwardRun,
    LoadWeights,
    OptimStep,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    decode_content,
)
from turnstream_server.operations.log import Lost, ModelLog, Run
from turnstream_server.operations.models import ModelRecord
from turnstream_server.operations.results import Answer, Failure, Result
from turnstream_server.telemetry.instruments import counter, histogram
from turnstream_server.trainer.passes import Turns

logger = logging.getLogger(__name__)

_OPERATIONS = counter(
    "turnstream_engine_commands",
    "Operations of hosted models that were run; those that failed have the outcome `failed`.",
    ["kind", "outcome"],
)
_OPERATION_SECONDS = histogram(
    "turnstream_engine_command_seconds",
    "Time of operations that run together, with the turns of other models.",
    ["kind"],
)

_LEASE_S: Final = 15.0
"""Time for which a log is leased. It is renewed every 4 s."""

_UNCHANGING: Final = (
    *("forward", "save_weights", "save_weights_for_sampler", "save_weights_external"),
)
"""Kinds of operations after whose errors the model is as before."""

_PASSED_ON: Final = (UnavailableError, FencedError, EndOfRunError, RunNotFoundError)
"""Errors of the store or a batcher, and not of an operation."""


class HostedModel:
    """A model of this worker.

    Every method but `renew` raises FencedError once another worker runs the model, EndOfRunError
    once its session has ended, and UnavailableError while the store or a batcher is away.
    """

    def __init__(
        self,
        client: redis.Redis,
        record: ModelRecord,
        *,
        call: Lockstep,
        options: EngineOptions,
    ) -> None:
        self.record = record
        self._client = client
        self._call = call
        self._options = options
        self._saver = Saver(client=client, root=options.folder, call=call)
        self._durable = DurableFolders(options.folder, record.model_id)
        self._runs = TrainedRuns(client, record, call=call)
        self._log: ModelLog | None = None
        self._is_built = False
        self._trouble: Failure | None = None
        self._unwritten: dict[int, Result] = {}
        self._covered = self._newest = -1
        self._checkpoint = ""
        self._covering: Result | None = None
        self._num_steps = 0
        self._has_gradient = False
        self._turns: Turns[bool] | None = None

    def renew(self) -> None:
        """Renew the lease; safe to call from another thread."""
        if (log := self._log) is None:
            return
        try:
            log.renew(lease_s=_LEASE_S)
        except FencedError:
            if log is self._log:  # else this worker has acquired it again
                raise

    def advance(self) -> bool:
        """Run the operations that are next, or one of their passes; return whether there were any.

        The first calls acquire the log and build the model.

        Raises:
            RejectedError: another worker has the log; `retry_after_s` says for how long.
        """
        turns, self._turns = self._turns or self._advance(), None
        try:
            next(turns)
        except StopIteration as end:
            return end.value
        except RunSessionEndedError:
            self._is_built = False
            raise
        self._turns = turns
        return True

    def _advance(self) -> Turns[bool]:
        is_ready = self._log is not None and self._is_built
        log = self._log if self._log is not None and is_ready else (yield from self._build())
        self._settle(log)
        work = log.take(gap_s=self._options.gap_s)
        if isinstance(work, Run):
            yield from self._run(log, work)
            return True
        if isinstance(work, Lost):
            logger.warning(
                "model %s: operation %d has never arrived: %d operations after it have failed",
                *(self.record.model_id, work.missing, len(work.failed) - 1),
            )
            return True
        return False

    def stop(self) -> None:
        """Write a durable checkpoint if there is no gradient, and release the log.

        A call with passes left is run again by the next worker, from its first pass.
        """
        self._turns = None
        if self._log is None:
            return
        is_whole = self._is_built and self._trouble is None and not self._unwritten
        if is_whole and not self._has_gradient and self._newest > self._covered:
            self._runs.acknowledge()
            self._cover(self._log, self._newest)
            self._runs.acknowledge()
        self._log.renew(lease_s=0)

    def unload(self) -> None:
        """Free the weights of the model."""
        self._is_built, self._turns = False, None
        self._call(Host.unload, self.record)

    def _build(self) -> Turns[ModelLog]:
        model_id = self.record.model_id
        self._log = None  # `renew` must not take the next lease for that of another worker
        self._log = log = ModelLog.acquire(
            self._client, model_id, worker=self._options.worker, lease_s=_LEASE_S
        )
        self._unwritten = {}
        self._trouble = self._covering = None
        self._covered, self._newest = log.covered, log.next_number - 1
        self._checkpoint = log.checkpoint
        self._num_steps, self._has_gradient = 0, False
        try:
            yield from self._rebuild(log)
        except _PASSED_ON:
            raise
        except Exception as error:
            logger.exception("model %s: the worker cannot rebuild it", model_id)
            message = f"the worker cannot rebuild model {model_id!r}: {_described(error)}"
            self._trouble = Failure(message, "server")
        self._is_built = True
        return log

    def _rebuild(self, log: ModelLog) -> Turns[None]:
        self._durable.keep_only(log.checkpoint)
        self._runs.begin(self._durable.positions(log.checkpoint) if log.checkpoint else {})
        if not log.checkpoint:
            self._call(Host.unload, self.record)
            if log.next_number > 0:
                message = f"there is no model {self.record.model_id!r}: its create_model has failed"
                self._trouble = Failure(message, "user")
            return
        folder = self._durable.path(log.checkpoint)
        self._covering = self._durable.result(log.checkpoint)
        self._call(Host.load, self.record, folder, optimizer=True)
        for run, skipped in log.history():
            if run.kind == "forward_backward":
                yield from run_training(self._call, log.model_id, run, skipped=skipped)
                self._has_gradient = True
            elif run.kind in ("forward_backward_run", "optim_step"):
                yield from self._run_again(log, run)
        self._runs.resume()

    def _run_again(self, log: ModelLog, run: Run) -> Turns[None]:
        content = decode_content(run.kind, log.read(run.numbers)[run.first])
        if isinstance(content, ForwardBackwardRun):
            yield from self._runs.train(content, timeout_s=REPLAY_S)
            self._has_gradient = True
        elif isinstance(content, OptimStep):
            run_optim_step(self._call, log.model_id, content)
            self._count_step()
            self._runs.acknowledge()

    def _run(self, log: ModelLog, run: Run) -> Turns[None]:
        if run.last <= self._covered and self._covering is not None:
            # The checkpoint was written and the result was not.
            self._unwritten = {run.last: self._covering}
        else:
            self._unwritten = yield from self._results(log, run)
        failpoint("engine.after_run")
        self._settle(log)
        failpoint("engine.after_finish")
        self._newest = run.last
        is_due = self._num_steps >= self._options.checkpoint_every or self._runs.needs_checkpoint
        is_whole = self._is_built and self._trouble is None and not self._has_gradient
        if is_due and is_whole:
            self._try_to_cover(log, run.last)
            self._runs.acknowledge()

    def _settle(self, log: ModelLog) -> None:
        """Acknowledge what runs do not know yet, and write the results that are not written."""
        self._runs.acknowledge()
        if self._unwritten:
            log.finish(self._unwritten)
            self._unwritten = {}

    def _results(self, log: ModelLog, run: Run) -> Turns[dict[int, Result]]:
        """Return the results of operations; after a half-way failure the model is not built."""
        with _OPERATION_SECONDS.labels(run.kind).time():
            results = yield from self._run_or_fail(log, run)
        for result in results.values():
            _OPERATIONS.labels(run.kind, "failed" if isinstance(result, Failure) else "done").inc()
        return results

    def _run_or_fail(self, log: ModelLog, run: Run) -> Turns[dict[int, Result]]:
        if self._trouble is not None:
            return dict.fromkeys(run.numbers, self._trouble)
        try:
            return (yield from self._run_kind(log, run))
        except _PASSED_ON:
            raise
        except BatchingError as error:
            failure = Failure(str(error), "user")
        except Exception as error:
            logger.exception("model %s: %s %d failed", log.model_id, run.kind, run.first)
            self._is_built = run.kind in _UNCHANGING
            log.renew(lease_s=_LEASE_S)  # an end of the session is no failure
            failure = Failure(f"{run.kind} failed: {_described(error)}", "server")
        if run.kind == "create":
            self._is_built = False
        return dict.fromkeys(run.numbers, failure)

    def _run_kind(self, log: ModelLog, run: Run) -> Turns[dict[int, Result]]:
        if run.kind in TRAINING_KINDS:
            results = yield from run_training(self._call, log.model_id, run)
            if run.kind == "forward_backward":
                self._has_gradient = True
                # The other calls of the passes keep their results: they are run again without it.
                self._is_built = not any(map(leaves_gradient, results.values()))
            return results
        number = run.first
        content = decode_content(run.kind, log.read(run.numbers)[number])
        match content:
            case ForwardBackwardRun():
                answer = yield from self._runs.train(content)
                self._has_gradient = True
            case OptimStep():
                answer = run_optim_step(self._call, log.model_id, content)
                self._count_step()
            case SaveWeights() | SaveForSampler() | SaveExternal():
                answer = self._saver.save(self.record, number, content)
            case CreateModel() | LoadWeights():
                answer = self._load(log, number, content)
        return {number: answer}

    def _load(self, log: ModelLog, number: int, content: CreateModel | LoadWeights) -> Answer:
        """Make the model, or load a checkpoint into it."""
        path, model_id = content.path, log.model_id
        if path is None:
            self._call(Host.make, self.record)
            answer = Answer({"model_id": model_id, "type": "create_model"})
        else:
            folder = self._saver.loadable(self.record, path)
            self._call(Host.load, self.record, folder, optimizer=content.optimizer)
            answer = Answer({"path": str(path), "model_id": model_id, "type": "load_weights"})
        self._has_gradient = False
        self._runs.applied()
        self._runs.acknowledge()
        # The loaded checkpoint may be deleted before the next one is due.
        self._cover(log, number, answer)
        return answer

    def _count_step(self) -> None:
        self._num_steps += 1
        self._has_gradient = False
        self._runs.applied()

    def _cover(self, log: ModelLog, number: int, result: Result | None = None) -> None:
        """Write a durable checkpoint after an operation, which there must be no gradient after."""
        name = self._durable.new_name(number)
        self._call(
            Host.save,
            log.model_id,
            self._durable.path(name),
            optimizer=True,
            files=further_files(result, self._runs.positions()),
        )
        failpoint("engine.after_durable")
        failpoint("engine.before_cover")
        log.cover(number, checkpoint=name)
        failpoint("engine.after_cover")
        before, self._checkpoint = self._checkpoint, name
        self._covered, self._covering, self._num_steps = number, result, 0
        self._runs.covered()
        with contextlib.suppress(OSError):  # removed with the next ones
            self._durable.keep_only(before, name)

    def _try_to_cover(self, log: ModelLog, number: int) -> None:
        """Write a durable checkpoint; after an error the next optimizer step tries again."""
        try:
            self._cover(log, number)
        except (FencedError, EndOfRunError):
            raise
        except Exception:
            logger.exception("model %s: no durable checkpoint after %d", log.model_id, number)


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, PassError) else f"{type(error).__name__}: {error}"
