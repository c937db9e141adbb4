"""An iterator of the mini-batches of a run, and the acknowledgements of a trainer.

with BatchStream("localhost:7600", "my-run", recovery_token=checkpoint.get("token")) as stream:
    for mini_batch in stream:
        train(mini_batch.to_torch(device), mini_batch.denominators)
        if mini_batch.is_last:
            token = stream.stepped()
            save(model, token=str(token))
            stream.committed(token)
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn, Self

from turnstream.errors import (
    BatcherUnavailableError,
    EndOfRunError,
    InvalidConfigError,
    NotReadyError,
    RejectedError,
    RunNotFoundError,
    StoreBehindError,
    UnavailableError,
)
from turnstream.records.configs import decode_config
from turnstream.store.run.batchers import Target
from turnstream.store.waits.awaited import batcher_away, not_ready
from turnstream.store.waits.wait_warnings import WaitWarnings
from turnstream.types import MiniBatchInfo, RecoveryToken
from turnstream.wire.v1.batches_pb2 import ObserveReply, StartReply
from turnstream.worker._calls import BatcherCalls, reasons_of
from turnstream.worker._prefetch import Prefetcher, StreamStatistics
from turnstream.worker.steps import PulledMiniBatch

GIB = 1 << 30

LONG_POLL_S = 30.0
"""Longest single wait on the batcher; shorter than the idle limits of common load balancers."""

STALL_GRACE_S = 10.0
"""After the requested wait plus this, a Get without an answer is ended and repeated."""

SILENT_S = 1.0
"""After the requested wait plus this, the last reason of the batcher is outdated."""

logger = logging.getLogger(__name__)


class MiniBatches:
    """Mini-batches of a run, in order; an iterator and a context manager.

    Attributes:
        config: settings of the run.
        run: id of the run.
    """

    def __init__(
        self,
        calls: BatcherCalls,
        first: StartReply | ObserveReply,
        *,
        max_prefetch_bytes: int,
        timeout_s: float,
    ) -> None:
        """Start to pull after the first reply; `calls` are closed with this."""
        try:
            self.config = decode_config(first.config_json)
        except BaseException:
            calls.close()
            raise
        self._calls = calls
        self.run = calls.run
        self._timeout_s = timeout_s
        # The deadline of an iteration is after several answers, so that its error has the reason.
        self._poll_s = min(LONG_POLL_S, timeout_s / 4)
        self._last_acknowledged = first.next_step - 1
        self._finished: MiniBatchInfo | None = None
        self._warnings = WaitWarnings()
        self._prefetcher = Prefetcher(
            calls,
            first_step=first.next_step,
            max_bytes=max_prefetch_bytes,
            wait_s=self._poll_s,
            row_weights=self.config.row_weights,
        )
        # A stream that is collected without `close` must end its thread.
        self._close = weakref.finalize(self, self._prefetcher.close)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PulledMiniBatch:
        began_s = time.monotonic()
        try:
            mini_batch = self._take(began_s)
        except EndOfRunError:
            raise StopIteration from None
        finally:
            self._prefetcher.statistics.wait_s += time.monotonic() - began_s
        self._finished = mini_batch.info if mini_batch.is_last else None
        return mini_batch

    def _take(self, began_s: float) -> PulledMiniBatch:
        """Return the next mini-batch; raise the reason of a missing one after `timeout_s`."""
        self._calls.process.require()
        while True:
            waited_s = time.monotonic() - began_s
            if self._warnings.is_due(waited_s):
                logger.warning("%s", self._missing(waited_s))
            pause_s = self._warnings.pause_s(waited_s) or 0.0
            remaining_s = max(0.0, self._timeout_s - waited_s)
            stall_s = self._end_stalled_get(since_s=began_s)
            mini_batch = self._prefetcher.take(timeout_s=min(pause_s, remaining_s, stall_s))
            if mini_batch is not None:
                return mini_batch
            if remaining_s <= min(pause_s, stall_s):
                raise self._missing(self._timeout_s) from self._prefetcher.progress.error

    def _missing(self, waited_s: float) -> UnavailableError:
        progress, run, target = self._prefetcher.progress, self._calls.run, self._calls.target
        waited = f"step {progress.step} of run {run!r} did not come within {round(waited_s, 1):g} s"
        why = f"step {progress.step} of run {run} was waited for {waited_s:.0f} s"
        wanted = not_ready("batch", why, run=run, step=progress.step, waited_s=waited_s)
        silent_s = time.monotonic() - progress.answered_s
        error = progress.error
        if isinstance(error, NotReadyError) and silent_s <= self._poll_s + SILENT_S:
            return NotReadyError(f"{waited}: {error}", [wanted, *error.reasons])
        if error is None or isinstance(error, NotReadyError):
            silent = batcher_away(address=target, since_s=silent_s)
            error = BatcherUnavailableError(f"{target} has not answered", [silent])
        causes = reasons_of(error, target=target, since_s=silent_s)
        return BatcherUnavailableError(f"{waited}: {error}", [wanted, *causes])

    def _end_stalled_get(self, *, since_s: float) -> float:
        """End a Get without an answer for its wait and 10 s; return the seconds until then.

        A batcher may answer the pings of the connection and hang all the same.
        """
        progress = self._prefetcher.progress
        limit_s = self._poll_s + min(STALL_GRACE_S, self._timeout_s / 2)
        latest_s = max(progress.answered_s, progress.asked_s, since_s)
        left_s = latest_s + limit_s - time.monotonic()
        if left_s > 0:
            return left_s
        self._calls.replicas.end_get()
        return limit_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        self._calls.process.refuse_pickle()

    def statistics(self) -> StreamStatistics:
        """Return the present numbers."""
        prefetcher, error = self._prefetcher, self._prefetcher.progress.error
        return replace(
            prefetcher.statistics,
            queued_mini_batches=len(prefetcher.queue),
            queued_bytes=prefetcher.queued_bytes,
            waiting_for=str(error) if isinstance(error, NotReadyError) else "",
        )

    def close(self) -> None:
        """Cancel the pending call, end the thread and disconnect. Safe to call twice."""
        self._close()

    def _finished_batch(self, call: str) -> MiniBatchInfo:
        self._calls.process.require()
        if self._finished is None:
            raise RejectedError(
                f"{call}() is for a batch whose last mini-batch was yielded, once; "
                f"the last acknowledged step is {self._last_acknowledged}"
            )
        return self._finished

    def _acknowledged(self, info: MiniBatchInfo) -> None:
        self._finished, self._last_acknowledged = None, info.step

    def _require_rank_0(self, call: str) -> None:
        dp_rank = self._calls.dp_rank
        if dp_rank != 0:
            raise RejectedError(f"{call}() is for dp_rank 0 alone, and this is dp_rank {dp_rank}")


class BatchStream(MiniBatches):
    """Mini-batches of a run in order, from the step after `recovery_token`.

    An interrupted or damaged transfer is fetched again, and no mini-batch is yielded twice.
    Iteration ends when the run is closed and its last batch is stepped.

    All calls raise FencedError after the start of a newer trainer session, and StoreBehindError if
    the store lost a batch that this trainer had, or the whole run. Iteration also raises:
        NotReadyError: no data for `timeout_s`, with the batcher's reason. Iterate again to wait.
        BatcherUnavailableError: no batcher answered for `timeout_s`.
        CorruptRecordError: the same mini-batch arrived damaged several times in a row.
        BatchingError: rows that cannot be part of the mini-batch's shipped denominators.

    Attributes:
        newest_version: the highest version announced so far, on other ranks than 0 before the last
            stepped step; -1: none. Never use one twice.
        version_before: the highest version announced for a step before the last stepped one, the
            same on all ranks; -1: none.
    """

    def __init__(
        self,
        target: Target,
        run: str,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        recovery_token: RecoveryToken | str | None = None,
        *,
        session: str | None = None,
        timeout_s: float = 600.0,
        max_prefetch_bytes: int = GIB,
        api_key: str | None = None,
    ) -> None:
        """Begin a trainer session and start to pull.

        Args:
            target: gRPC address of a batcher, "host:port", or "grpcs://host:port" with TLS; several
                replicas with commas. Or a function that returns the addresses, which is called
                again after none of them has answered.
            run: name of the run that has this name now.
            dp_rank: data-parallel position of this process.
            dp_world_size: number of such positions.
            recovery_token: the token in the checkpoint; None starts from the beginning.
            session: a new name that all ranks of this trainer share; it fences the one before.
            timeout_s: longest wait for a mini-batch, or for an acknowledgement.
            max_prefetch_bytes: bound of the prefetched bytes.
            api_key: key of all calls; None takes that of TURNSTREAM_API_KEY, else of the file
                TURNSTREAM_KEY_FILE.

        Raises:
            InvalidConfigError: a rank outside the world, several ranks without a session, or a name
                that is no valid Unicode.
            RunNotFoundError: no run of that name.
            AccessDeniedError: the key is not accepted, or may not train this run.
            StoreBehindError: the store does not have the token, or has lost the run.
            BatcherUnavailableError: no batcher answered for `timeout_s`.
        """
        if dp_world_size > 1 and not session:
            raise InvalidConfigError(
                "session", f"{dp_world_size} ranks need a name in common to be one trainer"
            )
        calls = BatcherCalls(
            target, run, dp_rank, dp_world_size, timeout_s=timeout_s, api_key=api_key
        )
        reply = calls.start(
            recovery_token="" if recovery_token is None else str(recovery_token),
            session=session or uuid.uuid4().hex,
        )
        self.newest_version: int = reply.newest_version
        self.version_before = -1
        self._newest_committed = reply.next_step - 1
        super().__init__(calls, reply, max_prefetch_bytes=max_prefetch_bytes, timeout_s=timeout_s)

    def __next__(self) -> PulledMiniBatch:
        with self._loss_of_run():
            return super().__next__()

    def poll(self, *, timeout_s: float) -> PulledMiniBatch | None:
        """Return the next mini-batch, or None if it does not come within `timeout_s`.

        It raises EndOfRunError where an iteration ends, and other errors as an iteration does.
        """
        with self._loss_of_run():
            mini_batch = self._prefetcher.take(timeout_s=timeout_s)
        if mini_batch is None:
            self._end_stalled_get(since_s=0.0)
        else:
            self._finished = mini_batch.info if mini_batch.is_last else None
        return mini_batch

    def stepped(self) -> RecoveryToken:
        """Acknowledge the batch whose last mini-batch was just yielded; return its recovery token.

        Every rank calls it, without a barrier. It returns once all ranks have called. The token
        belongs into the checkpoint of these weights.

        Raises:
            NotReadyError: the named rank has not called it within `timeout_s`.
            RejectedError: no finished batch waits to be acknowledged.
            ConflictError: the store lost a step before this one, or has another batch of the step.
        """
        info = self._finished_batch("stepped")
        with self._loss_of_run():
            reply = self._calls.stepped(info.step, manifest_hash=info.manifest_hash)
        self._acknowledged(info)
        if reply.HasField("version_before"):  # a batcher of an older release does not send it
            self.version_before = reply.version_before
            self.newest_version = max(self.newest_version, reply.version_before)
        else:
            self.version_before = self.announced_version
        return RecoveryToken.parse(reply.recovery_token)

    def committed(self, token: RecoveryToken | str) -> None:
        """Acknowledge that this rank's part of the checkpoint which holds `token` is on disk.

        It counts once all ranks have called; each call returns at once.

        Raises:
            ConflictError: no stepped batch has this token.
        """
        with self._loss_of_run():
            self._calls.committed(str(token))
        step = RecoveryToken.parse(str(token)).step
        self._newest_committed = max(self._newest_committed, step)

    def announce_version(
        self, version: int, *, step: int | None = None, weights_uri: str = ""
    ) -> None:
        """Announce weights that generators may load.

        Args:
            version: name of the weights, above `newest_version`.
            step: the last step in these weights; None: the last stepped one. Before `stepped`, name
                the step: groups of the next one wait until it is announced.
            weights_uri: address of the weights; "" if they travel another way.

        Raises:
            RejectedError: this is not dp_rank 0, or the version was used before.
        """
        self._require_rank_0("announce_version")
        made_after = self._last_acknowledged if step is None else step
        with self._loss_of_run():
            self._calls.announce_version(version, step=made_after, weights_uri=weights_uri)
        self.newest_version = max(self.newest_version, version)

    @property
    def announced_version(self) -> int:
        """The highest version announced so far, which rank 0 alone knows; else -1."""
        return self.newest_version if self._calls.dp_rank == 0 else -1

    @contextlib.contextmanager
    def _loss_of_run(self) -> Iterator[None]:
        """Raise StoreBehindError for a missing run of which this trainer had a step."""
        try:
            yield
        except RunNotFoundError as error:
            if not (self._last_acknowledged or self._prefetcher.statistics.num_mini_batches):
                raise
            raise StoreBehindError(
                f"the store has lost run {self._calls.run!r}, or it was deleted: "
                f"this trainer had stepped to {self._last_acknowledged} "
                f"and committed {self._newest_committed}"
            ) from error
