"""The prefetching thread: Get after Get, each mini-batch checked before it is queued."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc

from turnstream.batching.config.values import RowWeights
from turnstream.batching.scoring.denominators import check_share
from turnstream.errors import (
    BatcherUnavailableError,
    BatchingError,
    ConflictError,
    CorruptRecordError,
    FencedError,
    NotReadyError,
    RecordError,
    RejectedError,
    StoreBehindError,
    TurnstreamError,
    UnavailableError,
    UnknownFormatError,
    WaitReason,
)
from turnstream.store.client.backoff import pause_after
from turnstream.store.waits.wait_warnings import WaitWarnings
from turnstream.types import MiniBatchInfo
from turnstream.wire.v1.batches_pb2 import MiniBatchHeader
from turnstream.worker._calls import BatcherCalls, error_of, retry_delay_s
from turnstream.worker._frames import Arrival, read_step
from turnstream.worker._queue import ByteQueue, ClosedError
from turnstream.worker._reasons import batcher_silent, no_batch, of_failure
from turnstream.worker.mini_batch import PulledMiniBatch

LONG_POLL_S = 30.0
"""Longest single wait on the batcher; shorter than the idle limits of common load balancers."""

FIRST_WAIT_S = 1.0
"""Wait of the first Get after a failed one."""

REPEAT_STEPS_S = 5.0
"""Longest wait for each repeated acknowledgement."""

STALL_GRACE_S = 10.0
"""After the requested wait plus this, a Get without an answer is ended and repeated."""

SILENT_S = 1.0
"""After the requested wait plus this, the last reason of the batcher is outdated."""

MAX_BAD_IN_A_ROW = 3
"""Damage that repeats so often is in the batcher, not in the transfer."""

_ENDS_OF_SESSION = (FencedError, StoreBehindError, ConflictError)
"""After these, queued mini-batches are dropped too: their training would be lost."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Progress:
    """Progress of the prefetching thread, which alone writes it.

    Attributes:
        hashes: content hashes of the queued mini-batches of `step`.
        manifest_hash, previous_hash: manifest of the newest of them, and of the step before.
        num_failures: calls in a row without data, for the back-off.
        num_bad_in_a_row: transfers in a row that failed, by damage or an internal error.
        waiting_for, reasons: why the batcher has no data yet; empty if it has sent data.
        failure: failure of the last call, while it is retried.
        answered_s: time of the batcher's last message, or of the start.
        asked_s: time at which the present Get began.
    """

    step: int
    hashes: list[str] = field(default_factory=list)
    manifest_hash: str = ""
    previous_hash: str = ""
    num_failures: int = 0
    num_bad_in_a_row: int = 0
    num_retries: int = 0
    num_damaged: int = 0
    num_mini_batches: int = 0
    num_bytes: int = 0
    waiting_for: str = ""
    reasons: tuple[WaitReason, ...] = ()
    failure: TurnstreamError | None = None
    answered_s: float = field(default_factory=time.monotonic)
    asked_s: float = field(default_factory=time.monotonic)


class Prefetcher:
    """Pulls the steps of one share in order into a queue of at most `max_bytes`.

    Temporary failures are retried without end: only `take` has a deadline, so that a trainer may
    work for an hour between two mini-batches. `take` raises every other failure.
    """

    def __init__(
        self,
        calls: BatcherCalls,
        *,
        first_step: int,
        max_bytes: int,
        timeout_s: float,
        row_weights: RowWeights,
    ) -> None:
        """Start the thread; `timeout_s` is the longest wait of `take`.

        Rows with other weights than `row_weights` are refused.
        """
        self.progress = _Progress(first_step)
        self.queue: ByteQueue[PulledMiniBatch] = ByteQueue(max_bytes=max_bytes)
        self._calls = calls
        self._timeout_s = timeout_s
        self._row_weights: RowWeights = row_weights
        # The deadline of `take` is after several answers, so that its error has the reason.
        self._wait_s = min(LONG_POLL_S, timeout_s / 4)
        self._closed = threading.Event()
        self._warnings = WaitWarnings()
        self._thread = threading.Thread(target=self._run, name="turnstream-prefetch", daemon=True)
        self._thread.start()

    def take(self) -> PulledMiniBatch:
        """Return the next mini-batch; raise the reason of a missing one, or of the thread's end."""
        began_s = time.monotonic()
        while True:
            waited_s = time.monotonic() - began_s
            if self._warnings.is_due(waited_s):
                logger.warning("%s", self._missing(waited_s))
            pause_s = self._warnings.pause_s(waited_s) or 0.0
            remaining_s = max(0.0, self._timeout_s - waited_s)
            stall_s = self._end_stalled_get(since_s=began_s)
            try:
                return self.queue.take(timeout_s=min(pause_s, remaining_s, stall_s))
            except TimeoutError:
                if remaining_s <= min(pause_s, stall_s):
                    raise self._timed_out() from self.progress.failure

    def close(self) -> None:
        """End the pending call, the connection and the thread."""
        self._closed.set()
        self.queue.close()
        self._calls.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _missing(self, waited_s: float) -> TurnstreamError:
        """Return the error for a mini-batch that did not come within the time."""
        progress, run, target = self.progress, self._calls.share.run, self._calls.target
        waited = f"step {progress.step} of run {run!r} did not come within {round(waited_s, 1):g} s"
        wanted = no_batch(run, progress.step, waited_s=waited_s)
        silent_s = time.monotonic() - progress.answered_s
        if progress.failure is not None:
            why = of_failure(progress.failure, target=target, since_s=silent_s)
            message = f"{waited}: {progress.failure}"
            return BatcherUnavailableError(message, [wanted, *why, *progress.reasons])
        if not progress.waiting_for or silent_s > self._wait_s + SILENT_S:
            why = batcher_silent(target, since_s=silent_s)
            message = f"{waited}: {target} has not answered"
            return BatcherUnavailableError(message, [wanted, why, *progress.reasons])
        return NotReadyError(f"{waited}: {progress.waiting_for}", [wanted, *progress.reasons])

    def _timed_out(self) -> TurnstreamError:
        """Return the error of a wait that ended; end a silent Get, which is then repeated."""
        error = self._missing(self._timeout_s)
        if time.monotonic() - self.progress.answered_s > self._wait_s + SILENT_S:
            self._calls.end_get()
        return error

    def _end_stalled_get(self, *, since_s: float) -> float:
        """End a Get without an answer for its wait and 10 s; return the seconds until then.

        A batcher may answer the pings of the connection and hang all the same.
        """
        limit_s = self._wait_s + STALL_GRACE_S
        progress = self.progress
        latest_s = max(progress.answered_s, progress.asked_s, since_s)
        left_s = latest_s + limit_s - time.monotonic()
        if left_s > 0:
            return left_s
        self._calls.end_get()
        return limit_s

    # ----------------------------------------------------------------------------------
    # the prefetching thread

    def _run(self) -> None:
        try:
            while True:
                self._pull()
        except ClosedError:
            pass
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            self.queue.fail(error, drops=isinstance(error, _ENDS_OF_SESSION))

    def _pull(self) -> None:
        """Run one Get, then advance or recover."""
        started_s = self.progress.asked_s = time.monotonic()
        try:
            self._read_step()
        except grpc.RpcError as rpc_error:
            if self._closed.is_set():
                raise ClosedError from rpc_error
            self._recover(error_of(rpc_error), started_s=started_s)
        except TurnstreamError as error:
            self._recover(error, started_s=started_s)
        else:
            self.progress.step += 1
            self.progress.hashes = []
            self.progress.previous_hash = self.progress.manifest_hash

    def _read_step(self) -> None:
        progress = self.progress
        # After a failure the wait is short: a restarted store may have lost acknowledgements.
        longest_s = self._wait_s if progress.failure is None else FIRST_WAIT_S
        messages = self._calls.get(
            progress.step,
            wait_s=min(longest_s, self._wait_s),
            previous_hash=progress.previous_hash,
            manifest_hash=progress.manifest_hash if progress.hashes else "",
        )
        try:
            received = self._timed(messages)
            for arrival in read_step(received, step=progress.step, admit=self._admit):
                if arrival.keeps:
                    self._enqueue(arrival)
        finally:
            with contextlib.suppress(grpc.RpcError):
                for _ in messages:  # an unread call would hold its connection open
                    pass
            self.queue.release()

    def _timed(self, messages: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the same messages, and record when each came."""
        for message in messages:
            self.progress.answered_s = time.monotonic()
            yield message

    def _admit(self, header: MiniBatchHeader) -> Arrival:
        """Return a buffer once the queue has capacity; none for one that was queued before.

        A queued mini-batch whose content has changed is a ConflictError.
        """
        hashes = self.progress.hashes
        if header.mini_batch >= len(hashes):
            self.queue.reserve(header.num_bytes)
            return Arrival(header)
        if header.content_hash != hashes[header.mini_batch]:
            raise ConflictError(
                f"mini-batch {header.mini_batch} of step {header.step} changed after it was used"
            )
        return Arrival(header, keeps=False)

    def _enqueue(self, arrival: Arrival) -> None:
        """Check a complete mini-batch and queue it."""
        header, mini_batch = arrival.header, arrival.decode()
        info = mini_batch.info
        self._check_identity(info)
        check_share(
            mini_batch.rows,
            info.denominators,
            dp_world_size=info.dp_world_size,
            row_weights=self._row_weights,
        )
        pulled = PulledMiniBatch(
            rows=mini_batch.rows,
            info=info,
            content_hash=header.content_hash,
            num_bytes=header.num_bytes,
        )
        progress = self.progress
        progress.hashes.append(header.content_hash)
        progress.manifest_hash = info.manifest_hash
        progress.num_mini_batches += 1
        progress.num_bytes += header.num_bytes
        progress.num_failures = progress.num_bad_in_a_row = 0
        progress.waiting_for, progress.reasons, progress.failure = "", (), None
        self.queue.put(pulled)

    def _check_identity(self, info: MiniBatchInfo) -> None:
        share = self._calls.share
        found = (info.run, info.step, info.mini_batch, info.dp_rank, info.dp_world_size)
        index = len(self.progress.hashes)
        wanted = (share.run, self.progress.step, index, share.dp_rank, share.dp_world_size)
        if found != wanted:
            raise CorruptRecordError(
                f"(run, step, mini-batch, dp_rank, dp_world_size) {found} came instead of {wanted}"
            )

    def _recover(self, error: TurnstreamError, *, started_s: float) -> None:
        """Wait until the same Get may succeed; raise `error` if it never can."""
        progress = self.progress
        self._calls.end_failed_get(error)
        if isinstance(error, NotReadyError):
            progress.answered_s = time.monotonic()
            has_waited = time.monotonic() - started_s >= self._wait_s / 2
            progress.waiting_for, progress.failure = str(error), None
            progress.reasons = error.reasons
            self._repeat_steps()
            if has_waited:
                progress.num_failures = 0
                return
        else:
            progress.failure = error
        progress.num_failures += 1
        delay_s = self._retry_delay_s(error)
        if delay_s is None:
            raise error
        if progress.failure is not None:
            progress.num_retries += 1
            logger.warning(
                "Get is repeated",
                extra={"step": progress.step, "delay_s": delay_s, "error": str(error)},
            )
        self._closed.wait(delay_s)

    def _repeat_steps(self) -> None:
        """Acknowledge steps again: the store may wait for one that it has lost."""
        try:
            self._calls.repeat_stepped(timeout_s=REPEAT_STEPS_S)
        except UnavailableError:  # the next Get gets the same error
            pass
        except RejectedError as refusal:
            if self._closed.is_set():
                raise ClosedError from refusal
            raise

    def _retry_delay_s(self, error: TurnstreamError) -> float | None:
        """Return the seconds before the next attempt; None where none can succeed."""
        progress = self.progress
        if isinstance(error, UnavailableError | RejectedError):
            return retry_delay_s(error, num_failures=progress.num_failures)
        if isinstance(error, UnknownFormatError | BatchingError):
            return None
        progress.num_damaged += isinstance(error, RecordError)
        progress.num_bad_in_a_row += 1
        if progress.num_bad_in_a_row >= MAX_BAD_IN_A_ROW:
            return None
        return pause_after(progress.num_failures)
