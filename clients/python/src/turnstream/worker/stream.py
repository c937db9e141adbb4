"""An iterator of the mini-batches of a run, and the acknowledgements of a trainer.

In a training loop::

    with BatchStream("localhost:7600", "my-run", recovery_token=checkpoint.get("token")) as stream:
        for mini_batch in stream:
            tensors = mini_batch.to_torch(device)
            for part in tensors.micro_batches():
                loss = my_loss(model, part, tensors.denominators)
                loss.backward()
            optimizer.step()
            if mini_batch.is_last:
                token = stream.stepped()
                if save(model, token=str(token)):
                    stream.committed(token)
"""

from __future__ import annotations

import contextlib
import time
import uuid
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from turnstream.errors import (
    EndOfRunError,
    InvalidConfigError,
    RejectedError,
    RunNotFoundError,
    StoreBehindError,
)
from turnstream.records.configs import decode_config
from turnstream.types import MiniBatchInfo, RecoveryToken
from turnstream.wire.v1.batches_pb2 import ObserveReply, StartReply
from turnstream.worker._calls import BatcherCalls, Share
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
    """Mini-batches of a run, in order; an iterator and a context manager.

    Attributes:
        config: settings of the run.
        lineage: the history of the run at the start of the stream.
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
        self.lineage = first.lineage
        self._calls = calls
        self._last_acknowledged = first.next_step - 1
        self._finished: MiniBatchInfo | None = None
        self._wait_s = 0.0
        self._prefetcher = Prefetcher(
            calls,
            first_step=first.next_step,
            max_bytes=max_prefetch_bytes,
            timeout_s=timeout_s,
            row_weights=self.config.row_weights,
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
        """Return the present numbers."""
        progress, queue = self._prefetcher.progress, self._prefetcher.queue
        return StreamStatistics(
            num_mini_batches=progress.num_mini_batches,
            num_bytes=progress.num_bytes,
            queued_mini_batches=len(queue),
            queued_bytes=queue.num_bytes,
            max_prefetch_bytes=queue.max_bytes,
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
        self._check_rank(call)
        if self._finished is None:
            raise RejectedError(
                f"{call}() is for a batch whose last mini-batch was yielded, once; "
                f"the last acknowledged step is {self._last_acknowledged}"
            )
        return self._finished

    def _acknowledged(self, info: MiniBatchInfo) -> None:
        self._finished, self._last_acknowledged = None, info.step

    def _check_rank(self, call: str) -> None:
        """Refuse an acknowledgement of another rank than 0, unless every rank acknowledges."""
        if not self._calls.for_one_rank:
            self._require_rank_0(call)

    def _require_rank_0(self, call: str) -> None:
        dp_rank = self._calls.share.dp_rank
        if dp_rank != 0:
            raise RejectedError(f"{call}() is for dp_rank 0 alone, and this is dp_rank {dp_rank}")


class BatchStream(MiniBatches):
    """Mini-batches of a run in order, from the step after `recovery_token`.

    An interrupted or damaged transfer is fetched again, and no mini-batch is yielded twice.
    Iteration ends when the run is closed and its last batch is stepped.

    Iteration raises:
        NotReadyError: no data for `timeout_s`; has the batcher's reason. Iterating again waits
            again.
        BatcherUnavailableError: no batcher answered for `timeout_s`.
        CorruptRecordError: the same mini-batch arrived damaged several times in a row.
        BatchingError: rows that cannot be part of the mini-batch's shipped denominators.
        FencedError: a newer trainer session took over.
        StoreBehindError: the store lost a batch that this trainer had, or the whole run. In the
            second case it names the newest steps that were stepped and committed.

    Attributes:
        newest_version: the highest version announced so far; -1: none. Never use one twice.
    """

    def __init__(
        self,
        target: str,
        run: str,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        recovery_token: RecoveryToken | str | None = None,
        *,
        session: str | None = None,
        timeout_s: float = 600.0,
        max_prefetch_bytes: int = GIB,
        every_rank: bool = False,
    ) -> None:
        """Begin a trainer session and start to pull.

        Args:
            target: gRPC address of a batcher, "host:port"; several replicas with commas.
            run: name of the run that has this name now.
            dp_rank: data-parallel position of this process.
            dp_world_size: number of such positions.
            recovery_token: the token in the checkpoint; None starts from the beginning.
            session: a new name that all ranks of this trainer share; it fences the one before.
            timeout_s: longest wait for a mini-batch, or for an acknowledgement.
            max_prefetch_bytes: bound of the prefetched bytes.
            every_rank: whether every rank calls `stepped` and `committed`, without a barrier:
                either counts once all ranks have called. Otherwise only dp_rank 0 calls them.

        Raises:
            InvalidConfigError: a rank outside the world, several ranks without a session, or a name
                that is no valid Unicode.
            RunNotFoundError: no run of that name.
            StoreBehindError: the store does not have the token, or has lost the run.
            BatcherUnavailableError: no batcher answered for `timeout_s`.
        """
        share = Share(run=run, dp_rank=dp_rank, dp_world_size=dp_world_size)
        if dp_world_size > 1 and not session:
            raise InvalidConfigError(
                "session", f"{dp_world_size} ranks need a name in common to be one trainer"
            )
        calls = BatcherCalls(target, share=share, timeout_s=timeout_s, for_one_rank=every_rank)
        reply = calls.start(
            recovery_token="" if recovery_token is None else str(recovery_token),
            session=session or uuid.uuid4().hex,
        )
        self.newest_version: int = reply.newest_version
        self._newest_had = self._newest_committed = reply.next_step - 1
        super().__init__(calls, reply, max_prefetch_bytes=max_prefetch_bytes, timeout_s=timeout_s)

    def __next__(self) -> PulledMiniBatch:
        with self._loss_of_run():
            mini_batch = super().__next__()
        self._newest_had = mini_batch.info.step
        return mini_batch

    def stepped(self) -> RecoveryToken:
        """Acknowledge the batch whose last mini-batch was just yielded; return its recovery token.

        Call it on dp_rank 0 after a barrier of all ranks. With `every_rank`, call it on every rank;
        it returns once all ranks have called. The token belongs into the checkpoint of these
        weights.

        Raises:
            NotReadyError: the named rank has not called it within `timeout_s`.
            RejectedError: this is not dp_rank 0, or no finished batch waits to be acknowledged.
            FencedError: a newer trainer session took over.
            StoreBehindError, ConflictError: the store lost this step, one before it, or the run;
                or it has another batch of the step.
        """
        info = self._finished_batch("stepped")
        with self._loss_of_run():
            token = self._calls.stepped(info.step, manifest_hash=info.manifest_hash)
        self._acknowledged(info)
        return RecoveryToken.parse(token)

    def committed(self, token: RecoveryToken | str) -> None:
        """Acknowledge that the checkpoint which holds `token` is on disk.

        Raises:
            RejectedError: this is not dp_rank 0, or no stepped batch has this token.
            FencedError: a newer trainer session took over.
            StoreBehindError: the store lost the run.
        """
        self._check_rank("committed")
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
            step: the last step in these weights; None: the last stepped one.
            weights_uri: address of the weights; "" if they travel another way.

        Raises:
            RejectedError: this is not dp_rank 0, or the version was used before.
            FencedError: a newer trainer session took over.
            StoreBehindError: the store lost the run.
        """
        self._require_rank_0("announce_version")
        made_after = self._last_acknowledged if step is None else step
        with self._loss_of_run():
            self._calls.announce_version(version, step=made_after, weights_uri=weights_uri)
        self.newest_version = max(self.newest_version, version)

    @contextlib.contextmanager
    def _loss_of_run(self) -> Iterator[None]:
        """Raise StoreBehindError for a missing run of which this trainer had a step."""
        try:
            yield
        except RunNotFoundError as error:
            if not self._newest_had:
                raise
            raise StoreBehindError(
                f"the store has lost run {self._calls.share.run!r}, or it was deleted: "
                f"{self._progress()}"
            ) from error

    def _progress(self) -> str:
        """Return the newest steps of this rank, for an error."""
        dp_rank = self._calls.share.dp_rank
        if dp_rank:
            return f"dp_rank {dp_rank} of this trainer had step {self._newest_had}"
        return (
            f"this trainer had stepped to {self._last_acknowledged} "
            f"and committed {self._newest_committed}"
        )
