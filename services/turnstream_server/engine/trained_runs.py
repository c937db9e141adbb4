"""The runs that one hosted model trains on, as the first rank of its worker drives them.

A durable checkpoint has a position in each run: the recovery token of the newest step that was
applied, and the number of mini-batches that were taken after it. A rebuilt model begins a trainer
session with this token, so that it gets the same mini-batches again.

A session commits the step of its token. So it begins with the token of a durable checkpoint alone.
If it ends before the model does, the model is rebuilt.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import redis

from turnstream.errors import BatchingError, RunNotFoundError, UnavailableError
from turnstream.store.run.configs import read_revisions
from turnstream.types import RecoveryToken
from turnstream_server.engine.checkpoints import RunPosition
from turnstream_server.engine.host import Host, Lockstep
from turnstream_server.engine.run_streams import RunRefusedError, run_output
from turnstream_server.engine.training import in_turns
from turnstream_server.failpoints import failpoint
from turnstream_server.ledger.core.frontier import read_frontier
from turnstream_server.operations.contents import ForwardBackwardRun
from turnstream_server.operations.models import ModelRecord
from turnstream_server.operations.results import TrainingOutput
from turnstream_server.trainer.passes import Turns

logger = logging.getLogger(__name__)

LIVE_S: Final = 0.2
"""First wait for a mini-batch, which may be on its way. Other models wait as long."""

REPLAY_S: Final = 30.0
"""Wait for a mini-batch that was trained before: it is planned."""


class RunSessionEndedError(UnavailableError):
    """A trainer session has ended, and no other trainer has the run: the model must be rebuilt."""


@dataclass(slots=True)
class _Run:
    """One run.

    Attributes:
        position: position of the model.
        num_to_skip: mini-batches that were taken before this session.
        is_open: all ranks have a stream.
        is_waiting: a pull has found no mini-batch.
        is_complete: all mini-batches of the step were taken.
        is_applied: the step was applied, and no batcher knows.
        is_finished: the run was finished at the last pull.
        committed: token of the newest durable checkpoint that the batcher knows.
        to_commit: token of a durable checkpoint of which no batcher knows.
    """

    position: RunPosition
    num_to_skip: int = 0
    is_open: bool = False
    is_waiting: bool = False
    is_complete: bool = False
    is_applied: bool = False
    is_finished: bool = False
    committed: str = ""
    to_commit: str = ""


class TrainedRuns:
    """The runs of one model.

    Attributes:
        needs_checkpoint: the model cannot be rebuilt from an older durable checkpoint, as another
            trainer has taken a run over.
    """

    def __init__(self, client: redis.Redis, record: ModelRecord, *, call: Lockstep) -> None:
        self._client = client
        self._record = record
        self._call = call
        self._runs: dict[str, _Run] = {}
        self.needs_checkpoint = False

    def begin(self, positions: Mapping[str, RunPosition]) -> None:
        """Begin at the positions of a durable checkpoint, without any session."""
        self._call(Host.close_runs, self._record.model_id)
        self._runs = {run: _Run(each, each.num_taken) for run, each in positions.items()}
        self.needs_checkpoint = False

    def positions(self) -> dict[str, RunPosition]:
        """Return the positions for a durable checkpoint; all applied steps are acknowledged."""
        found = {run: each.position for run, each in self._runs.items()}
        return {run: each for run, each in found.items() if each != RunPosition()}

    def train(
        self, content: ForwardBackwardRun, *, timeout_s: float | None = None
    ) -> Turns[TrainingOutput]:
        """Add the gradient of the next mini-batch of a run, and return its metrics.

        Pauses between forward passes, which other models may use. Without `timeout_s` the wait for
        the mini-batch is short.

        Raises:
            BatchingError: the run cannot be trained. The model is unchanged.
            UnavailableError: no mini-batch is ready, or a batcher is away. Call again.
        """
        run = content.run
        own = self._runs.setdefault(run, _Run(RunPosition()))
        if own.position.lost:
            raise BatchingError(own.position.lost)
        if own.is_complete:
            message = f"all mini-batches of a step of run {run!r} were taken"
            raise BatchingError(f"{message}: call optim_step before the next one")
        if timeout_s is None:
            timeout_s = 0.0 if own.is_waiting else LIVE_S
        own.is_waiting = True
        with self._losing(run, own):
            if own.is_finished and not read_frontier(self._client, run).is_finished:
                raise RunSessionEndedError(f"run {run!r} was reopened")
            self._open(run, own)
            self._skip(run, own, timeout_s=timeout_s)
            self._pull(run, timeout_s=timeout_s)
        model_id = self._record.model_id
        reports = yield from in_turns(lambda: self._call(Host.train_run, model_id, content))
        own.is_waiting, own.is_complete = False, reports[0].is_last
        own.position = own.position._replace(num_taken=own.position.num_taken + 1)
        return run_output(reports)

    def applied(self) -> None:
        """Record that the gradient of the model was applied, or dropped."""
        for own in self._runs.values():
            own.is_applied = own.is_complete

    def covered(self) -> None:
        """Record that the positions are those of a durable checkpoint."""
        self.needs_checkpoint = False
        for own in self._runs.values():
            if own.is_open and own.position.token != own.committed:
                own.to_commit = own.position.token

    def acknowledge(self) -> None:
        """Acknowledge applied steps, and durable checkpoints, of which no batcher knows."""
        for run, own in self._runs.items():
            with contextlib.suppress(RunRefusedError), self._losing(run, own):
                self._acknowledge(run, own)

    def resume(self) -> None:
        """Begin sessions again whose newest durable checkpoint is not committed.

        The beginning of a session commits it. A session of another trainer is not replaced.
        """
        for run, own in self._runs.items():
            if not own.is_open and not own.position.lost and self._is_uncommitted(run, own):
                with contextlib.suppress(RunRefusedError), self._losing(run, own):
                    self._open(run, own)

    def _open(self, run: str, own: _Run) -> None:
        if own.is_open:
            return
        self._check(run)
        session = f"{self._session_prefix}{uuid.uuid4().hex}"
        token = own.position.token
        self._call(Host.open_run, self._record.model_id, run, token=token, session=session)
        own.is_open, own.committed = True, token

    def _skip(self, run: str, own: _Run, *, timeout_s: float) -> None:
        while own.num_to_skip:
            self._pull(run, timeout_s=timeout_s)
            self._call(Host.drop_run, self._record.model_id, run)
            own.num_to_skip -= 1

    def _check(self, run: str) -> None:
        """Raise RunRefusedError before a session of this run would replace another one."""
        try:
            config = read_revisions(self._client, run).stored[-1].config
        except RunNotFoundError as error:
            raise RunRefusedError(str(error)) from error
        if config.estimator == "gae":
            raise RunRefusedError(
                f"run {run!r} has estimator='gae', and a hosted model has no critic"
            )

    def _pull(self, run: str, *, timeout_s: float) -> None:
        """Pull the next mini-batch on all ranks; those that have it keep it after an error."""
        self._call(Host.pull_run, self._record, run, timeout_s=timeout_s)

    def _acknowledge(self, run: str, own: _Run) -> None:
        model_id = self._record.model_id
        if own.is_applied:
            token = self._call(Host.step_run, model_id, run)[0]
            own.position = RunPosition(token)
            own.is_complete = own.is_applied = False
            failpoint("engine.after_stepped")
        if own.to_commit:
            failpoint("engine.before_committed")
            self._call(Host.commit_run, model_id, run, token=own.to_commit)
            own.committed, own.to_commit = own.to_commit, ""

    @contextlib.contextmanager
    def _losing(self, run: str, own: _Run) -> Iterator[None]:
        """Record why a run refuses this model; RunSessionEndedError if no other trainer has it."""
        try:
            yield
        except RunRefusedError as error:
            own.is_finished = error.is_finished
            is_untrained = not own.is_open and own.position == RunPosition()
            if not own.is_finished and not is_untrained:
                if own.is_open and not self._is_taken_over(run):
                    raise RunSessionEndedError(str(error)) from error
                self._lose(own, error)
            raise

    def _lose(self, own: _Run, error: RunRefusedError) -> None:
        logger.warning("model %s cannot train a run any more: %s", self._record.model_id, error)
        own.position = own.position._replace(lost=str(error))
        own.is_open = own.is_complete = own.is_applied = False
        own.to_commit = ""
        self.needs_checkpoint = True

    @property
    def _session_prefix(self) -> str:
        return f"{self._record.model_id} "

    def _is_taken_over(self, run: str) -> bool:
        try:
            session = read_frontier(self._client, run).session
        except RunNotFoundError:
            return True
        return bool(session) and not session.startswith(self._session_prefix)

    def _is_uncommitted(self, run: str, own: _Run) -> bool:
        """Return whether the newest session is that of this model, and lacks its last commit."""
        if not own.position.token:
            return False
        try:
            frontier = read_frontier(self._client, run)
        except RunNotFoundError:
            return False
        step = RecoveryToken.parse(own.position.token).step
        return frontier.session.startswith(self._session_prefix) and frontier.committed < step
