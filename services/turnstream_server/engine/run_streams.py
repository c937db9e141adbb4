"""The runs that hosted models train on, on one rank: a trainer session's stream for each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from turnstream.errors import BatchingError, EndOfRunError, NotReadyError, RejectedError
from turnstream.types import MiniBatchInfo
from turnstream.worker import BatchStream, PulledMiniBatch

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
    """One rank's part of a trainer session.

    Attributes:
        pulled: mini-batch that was pulled, and not taken.
        stepped: step of the newest acknowledgement, and its recovery token.
    """

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
        """Return the next mini-batch, which stays the next one until it is taken.

        Raises:
            NotReadyError: it has not come within `timeout_s`.
            RunRefusedError: the session has ended, or the run is finished.
        """
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
