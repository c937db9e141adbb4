"""The prefetching thread: Get after Get, each mini-batch checked before it is queued."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
import pyarrow as pa

from turnstream.batching.config.values import RowWeights
from turnstream.batching.scoring.denominators import check_share
from turnstream.errors import (
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
)
from turnstream.records.batches import decode_mini_batch
from turnstream.store.client.backoff import pause_after
from turnstream.wire.v1.batches_pb2 import GetChunk, MiniBatchHeader
from turnstream.worker._calls import BatcherCalls, error_of, retry_delay_s
from turnstream.worker._read_step import Arrival, read_parts
from turnstream.worker.steps import PulledMiniBatch

FIRST_WAIT_S = 1.0
"""Wait of the first Get for a step, and of the next one after a failure."""

REPEAT_STEPS_S = 5.0
"""Longest wait for each repeated acknowledgement."""

MAX_BAD_IN_A_ROW = 3
"""Damage that repeats so often is in the batcher, not in the transfer."""

_ENDS_OF_SESSION = (FencedError, StoreBehindError, ConflictError)
"""After these, queued mini-batches are dropped too: their training would be lost."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class StreamStatistics:
    """Statistics of a stream.

    Attributes:
        num_mini_batches, num_bytes: received, checked and queued since the start.
        queued_mini_batches: prefetched and not yet taken by the iteration.
        queued_bytes: bytes of these, and of the one that is arriving.
        max_prefetch_bytes: the bound on `queued_bytes`.
        num_retries: calls repeated after an unavailable batcher or an interrupted stream.
        num_damaged: mini-batches dropped on arrival because of a wrong hash or length.
        wait_s: seconds that the iteration spent waiting for data.
        waiting_for: the batcher's last reason for having no data yet; "" if none.
    """

    num_mini_batches: int = 0
    num_bytes: int = 0
    queued_mini_batches: int = 0
    queued_bytes: int = 0
    max_prefetch_bytes: int
    num_retries: int = 0
    num_damaged: int = 0
    wait_s: float = 0.0
    waiting_for: str = ""


@dataclass(slots=True)
class Progress:
    """Progress of the prefetching thread, which alone writes it.

    Attributes:
        hashes: content hashes of the queued mini-batches of `step`.
        manifest_hash, previous_hash: manifest of the newest of them, and of the step before.
        num_failures: calls in a row without data, for the back-off.
        num_bad_in_a_row: transfers in a row that failed, by damage or an internal error.
        error: failure of the last call, which is retried; None if it has sent data. A NotReadyError
            says why the batcher has no data yet.
        answered_s: time of the batcher's last message, or of the start.
        asked_s: time at which the present Get began.
        wait_s: seconds that it may wait for its step.
    """

    step: int
    hashes: list[str] = field(default_factory=list)
    manifest_hash: str = ""
    previous_hash: str = ""
    num_failures: int = 0
    num_bad_in_a_row: int = 0
    error: TurnstreamError | None = None
    answered_s: float = field(default_factory=time.monotonic)
    asked_s: float = field(default_factory=time.monotonic)
    wait_s: float = FIRST_WAIT_S


class Prefetcher:
    """Pulls the steps of one share in order into a queue of at most `max_bytes`.

    Temporary failures are retried without end, so that a trainer may work for an hour between two
    mini-batches. `take` raises every other failure. Rows with other weights than `row_weights` are
    refused.
    """

    def __init__(
        self,
        calls: BatcherCalls,
        *,
        first_step: int,
        max_bytes: int,
        wait_s: float,
        row_weights: RowWeights,
    ) -> None:
        self.progress = Progress(first_step)
        self.statistics = StreamStatistics(max_prefetch_bytes=max_bytes)
        self.queue: deque[PulledMiniBatch] = deque()
        # Kept after an interruption: the next Get resumes it.
        self._arrival: Arrival[MiniBatchHeader] | None = None
        self._failure: BaseException | None = None
        self._changed = threading.Condition()  # guards the three above
        self._calls = calls
        self._row_weights: RowWeights = row_weights
        self._wait_s = wait_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="turnstream-prefetch", daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        """Bytes of the queue, and of the mini-batch that is arriving."""
        self._calls.process.require()
        with self._changed:
            arriving = 0 if self._arrival is None else self._arrival.header.num_bytes
            return arriving + sum(each.num_bytes for each in self.queue)

    def take(self, *, timeout_s: float) -> PulledMiniBatch | None:
        """Return the oldest mini-batch, None after `timeout_s`, or raise what ended the thread."""
        self._calls.process.require()
        with self._changed:
            self._changed.wait_for(
                lambda: self.queue or self._failure or self._closed.is_set(), timeout=timeout_s
            )
            if self._closed.is_set():
                raise RejectedError("the stream was closed")
            if self.queue:
                self._changed.notify_all()
                return self.queue.popleft()
            if self._failure is not None:
                raise self._failure
            return None

    def close(self) -> None:
        """End the pending call, the connection and the thread; a forked process has none."""
        if not self._calls.process.is_here:
            return
        self._closed.set()
        with self._changed:
            self.queue.clear()
            self._changed.notify_all()
        self._calls.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ----------------------------------------------------------------------------------
    # the prefetching thread

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._pull()
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            with self._changed:
                self._failure = error
                if isinstance(error, _ENDS_OF_SESSION):
                    self.queue.clear()
                self._changed.notify_all()

    def _pull(self) -> None:
        progress = self.progress
        progress.asked_s = time.monotonic()
        try:
            self._read_step()
        except grpc.RpcError as rpc_error:
            self._recover(error_of(rpc_error))
        except TurnstreamError as error:
            self._recover(error)
        else:
            progress.step += 1
            progress.hashes = []
            progress.previous_hash = progress.manifest_hash

    def _read_step(self) -> None:
        progress = self.progress
        # The first wait is short: the batcher soon says what it waits for. So is the one after a
        # failure: a restarted store may have lost acknowledgements.
        is_first = not isinstance(progress.error, NotReadyError)
        progress.wait_s = min(FIRST_WAIT_S, self._wait_s) if is_first else self._wait_s
        messages = self._calls.get(
            progress.step,
            wait_s=progress.wait_s,
            previous_hash=progress.previous_hash,
            manifest_hash=progress.manifest_hash if progress.hashes else "",
            num_mini_batches=(held := len(progress.hashes)),
            arrival=self._arrival,
        )
        messages = self._timed(messages)
        try:
            arrivals = read_parts(
                messages, GetChunk, step=progress.step, held=held, admit=self._admit
            )
            for arrival in arrivals:
                if arrival.buffer is not None:
                    self._enqueue(arrival.header, arrival.buffer)
        except TurnstreamError:
            self._arrive(None)
            self._calls.replicas.end_get()  # the rest of the call would hold its connection open
            raise

    def _timed(self, messages: Iterator[bytes]) -> Iterator[bytes]:
        for message in messages:
            self.progress.answered_s = time.monotonic()
            yield message

    def _admit(self, header: MiniBatchHeader) -> Arrival[MiniBatchHeader]:
        """Return the place for a mini-batch once the queue has capacity.

        It has no buffer if the mini-batch was queued before, and bytes if the batcher resumes. A
        mini-batch larger than the bound enters an empty queue; otherwise it could never enter.
        """
        hashes = self.progress.hashes
        if header.mini_batch < len(hashes):
            known, found = hashes[header.mini_batch], header.content_hash
            # Replicas of two releases have hashes of two lengths.
            if found != known and len(found) == len(known):
                which = f"mini-batch {header.mini_batch} of step {header.step}"
                raise ConflictError(f"{which} changed after it was used")
            return Arrival(header)
        if header.first_byte:
            if self._arrival is None or not self._arrival.resume(header):
                raise CorruptRecordError(
                    f"mini-batch {header.mini_batch} of step {header.step} begins at byte "
                    f"{header.first_byte}, and the bytes before it are not here"
                )
            return self._arrival
        self._arrive(None)
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed.is_set()
                    or not self.queue
                    or self.queued_bytes + header.num_bytes <= self.statistics.max_prefetch_bytes
                )
            )
        # Arrow's allocator aligns to 64 bytes, as columns need it, and reuses its pages.
        buffer = memoryview(pa.allocate_buffer(header.num_bytes)).cast("B")
        arrival = Arrival(header, buffer)
        self._arrive(arrival)
        return arrival

    def _arrive(self, arrival: Arrival[MiniBatchHeader] | None) -> None:
        with self._changed:
            self._arrival = arrival

    def _enqueue(self, header: MiniBatchHeader, data: memoryview) -> None:
        mini_batch = decode_mini_batch(data.toreadonly(), expected_hash=header.content_hash)
        info, progress, calls = mini_batch.info, self.progress, self._calls
        found = (info.run, info.step, info.mini_batch, info.dp_rank, info.dp_world_size)
        index = len(progress.hashes)
        wanted = (calls.run, progress.step, index, calls.dp_rank, calls.dp_world_size)
        if found != wanted:
            raise CorruptRecordError(
                f"(run, step, mini-batch, dp_rank, dp_world_size) {found} came instead of {wanted}"
            )
        check_share(
            mini_batch.rows,
            info.denominators,
            dp_world_size=info.dp_world_size,
            row_weights=self._row_weights,
        )
        progress.hashes.append(header.content_hash)
        progress.manifest_hash = info.manifest_hash
        self.statistics.num_mini_batches += 1
        self.statistics.num_bytes += header.num_bytes
        progress.num_failures = progress.num_bad_in_a_row = 0
        progress.error = None
        pulled = PulledMiniBatch(
            rows=mini_batch.rows,
            info=info,
            content_hash=header.content_hash,
            num_bytes=header.num_bytes,
        )
        with self._changed:
            self.queue.append(pulled)
            self._arrival = None
            self._changed.notify_all()

    def _recover(self, error: TurnstreamError) -> None:
        """Wait until the same Get may succeed; raise `error` if it never can."""
        if self._closed.is_set():
            return
        progress = self.progress
        progress.error = error
        self._calls.end_failed_get(error, has_data=progress.answered_s > progress.asked_s)
        if isinstance(error, NotReadyError):
            progress.answered_s = time.monotonic()
            has_waited = progress.answered_s - progress.asked_s >= progress.wait_s / 2
            # The store may wait for a step that it has lost. The next Get gets the same error.
            with contextlib.suppress(UnavailableError):
                self._calls.repeat_stepped(timeout_s=REPEAT_STEPS_S)
            if has_waited:
                progress.num_failures = 0
                return
        progress.num_failures += 1
        delay_s = self._retry_delay_s(error)
        if delay_s is None:
            raise error
        if not isinstance(error, NotReadyError):
            self.statistics.num_retries += 1
            logger.warning(
                "Get is repeated",
                extra={"step": progress.step, "delay_s": delay_s, "error": str(error)},
            )
        self._closed.wait(delay_s)

    def _retry_delay_s(self, error: TurnstreamError) -> float | None:
        """Return the seconds before the next attempt; None where none can succeed."""
        progress = self.progress
        if isinstance(error, UnavailableError | RejectedError):
            return retry_delay_s(error, num_failures=progress.num_failures)
        if isinstance(error, UnknownFormatError | BatchingError):
            return None
        self.statistics.num_damaged += isinstance(error, RecordError)
        progress.num_bad_in_a_row += 1
        if progress.num_bad_in_a_row >= MAX_BAD_IN_A_ROW:
            return None
        return pause_after(progress.num_failures)
