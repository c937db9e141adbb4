"""The common part of both streams of a worker: an iterator over prefetched mini-batches."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass
from typing import Self

from turnstream.batching.config import BatchingConfig
from turnstream.errors import EndOfRunError, RejectedError
from turnstream.types import MiniBatchInfo
from turnstream.worker._acknowledged import AcknowledgedSteps
from turnstream.worker._calls import BatcherCalls
from turnstream.worker._prefetch import Prefetcher
from turnstream.worker._queue import ClosedError
from turnstream.worker.mini_batch import PulledMiniBatch

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
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

    num_mini_batches: int
    num_bytes: int
    queued_mini_batches: int
    queued_bytes: int
    max_prefetch_bytes: int
    num_retries: int
    num_damaged: int
    wait_s: float
    waiting_for: str


class MiniBatches:
    """Mini-batches of a run in order; an iterator and a context manager.

    Args:
        calls: the connection; closed with this.
        first_step: the first step to yield.
        config: settings of the run.
        lineage: the history of the run at the start of the stream.
        max_prefetch_bytes: bound of the prefetched bytes.
        timeout_s: longest wait for a mini-batch.
    """

    def __init__(
        self,
        calls: BatcherCalls,
        *,
        first_step: int,
        config: BatchingConfig,
        lineage: str,
        max_prefetch_bytes: int,
        timeout_s: float,
    ) -> None:
        self.config = config
        self.lineage = lineage
        self._calls = calls
        self._steps = AcknowledgedSteps(calls)
        self._last_acknowledged = first_step - 1
        self._finished: MiniBatchInfo | None = None
        self._wait_s = 0.0
        self._prefetcher = Prefetcher(
            calls,
            first_step=first_step,
            max_bytes=max_prefetch_bytes,
            timeout_s=timeout_s,
            row_weights=config.row_weights,
            steps=self._steps,
        )
        # A stream that is collected without `close` must end its thread.
        self._close = weakref.finalize(self, self._prefetcher.close)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PulledMiniBatch:
        started_s = time.monotonic()
        try:
            mini_batch = self._prefetcher.take()
        except EndOfRunError:
            raise StopIteration from None
        except ClosedError:
            raise RejectedError("the stream was closed") from None
        finally:
            self._wait_s += time.monotonic() - started_s
        self._finished = mini_batch.info if mini_batch.is_last else None
        return mini_batch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def statistics(self) -> StreamStatistics:
        """Return numbers of the received and the queued mini-batches."""
        progress, size = self._prefetcher.progress, self._prefetcher.queue_size()
        return StreamStatistics(
            num_mini_batches=progress.num_mini_batches,
            num_bytes=progress.num_bytes,
            queued_mini_batches=size.num_items,
            queued_bytes=size.num_bytes,
            max_prefetch_bytes=self._prefetcher.max_bytes,
            num_retries=progress.num_retries,
            num_damaged=progress.num_damaged,
            wait_s=self._wait_s,
            waiting_for=progress.waiting_for,
        )

    def close(self) -> None:
        """Cancel the pending call, end the thread and disconnect. Safe to call twice."""
        self._close()

    def _finished_batch(self, call: str) -> MiniBatchInfo:
        """Return the batch for the acknowledgement `call`."""
        self._check_speaker(call)
        if self._finished is None:
            raise RejectedError(
                f"{call}() is for a batch whose last mini-batch was yielded, once; "
                f"the last acknowledged step is {self._last_acknowledged}"
            )
        return self._finished

    def _acknowledged(self, info: MiniBatchInfo) -> None:
        self._finished, self._last_acknowledged = None, info.step

    def _check_speaker(self, call: str) -> None:
        """Refuse an acknowledgement of another rank than 0, unless every rank acknowledges."""
        if not self._calls.for_one_rank:
            self._require_rank_0(call)

    def _require_rank_0(self, call: str) -> None:
        dp_rank = self._calls.share.dp_rank
        if dp_rank != 0:
            raise RejectedError(f"{call}() is for dp_rank 0 alone, and this is dp_rank {dp_rank}")
