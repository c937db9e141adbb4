"""The worker's end of the data path: an iterator of mini-batches, and the acknowledgements.

Ten lines in anybody's training loop::

    with BatchStream("localhost:7070", "my-run", recovery_token=checkpoint.get("token")) as stream:
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

import time
import uuid
import weakref
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from turnstream.batching.config import BatchingConfig
from turnstream.errors import EndOfRunError, InvalidConfigError, RejectedError
from turnstream.records.configs import decode_config
from turnstream.types import MiniBatchInfo, RecoveryToken
from turnstream.worker._calls import BatcherCalls, Share
from turnstream.worker._prefetch import Prefetcher
from turnstream.worker._queue import ClosedError
from turnstream.worker.mini_batch import PulledMiniBatch

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStatistics:
    """What a stream has done so far, and what it holds.

    Attributes:
        num_mini_batches, num_bytes: received, checked and queued since the start.
        queued_mini_batches: pulled ahead and not yet taken by the iteration.
        queued_bytes: of these, and of the one that is arriving.
        max_prefetch_bytes: the bound on `queued_bytes`.
        num_retries: calls repeated because a batcher was away or cut the stream.
        num_damaged: mini-batches thrown away on arrival because hash or length disagreed.
        wait_s: seconds that the iteration spent waiting for data.
        waiting_for: the last reason a batcher gave for having no data yet; "" if none.
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


class BatchStream:
    """Mini-batches of a run in order, from the step after `recovery_token`.

    One thread pulls ahead, at most `max_prefetch_bytes`. A batcher that is away is called again
    with back-off; a cut or damaged transfer is fetched again and what was already yielded is not
    yielded twice. Iteration ends when the run is closed and its last batch was delivered.

    Iteration raises:
        NotReadyError: no data for `timeout_s`; carries the batcher's reason. Iterating again waits
            again.
        BatcherUnavailableError: no batcher answered for `timeout_s`.
        CorruptRecordError: the same mini-batch arrived damaged several times in a row.
        BatchingError: rows that cannot be part of the mini-batch's shipped denominators.
        FencedError: a newer trainer session took over.

    Attributes:
        newest_version: the highest version announced so far; -1: none. Never use one twice.
        config: of the run.
        lineage: the history that this session continues.
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
    ) -> None:
        """Begin a trainer session and start to pull.

        Args:
            target: gRPC address of a batcher, "host:port".
            run: name of the run.
            dp_rank: data-parallel position of this process.
            dp_world_size: number of such positions.
            recovery_token: as it was kept in the checkpoint; None starts from the beginning.
            session: a name that all ranks of this trainer share, and no earlier one had.
                Needed with several ranks; beginning a session fences the one before.
            timeout_s: longest wait for a mini-batch, or for an acknowledgement to be taken.
            max_prefetch_bytes: bound of what is pulled ahead.

        Raises:
            InvalidConfigError: a rank outside the world, or several ranks without a session.
            RunNotFoundError: no run of that name.
            StoreBehindError: the store does not know the token.
            BatcherUnavailableError: no batcher answered for `timeout_s`.
        """
        _check_share(dp_rank, dp_world_size=dp_world_size, session=session)
        share = Share(run=run, dp_rank=dp_rank, dp_world_size=dp_world_size)
        self._calls = BatcherCalls(target, share=share, timeout_s=timeout_s)
        try:
            reply = self._calls.start(
                recovery_token="" if recovery_token is None else str(recovery_token),
                session=session or uuid.uuid4().hex,
            )
            self.config: BatchingConfig = decode_config(reply.config_json)
        except BaseException:
            self._calls.close()
            raise
        self.lineage: str = reply.lineage
        self.newest_version: int = reply.newest_version
        self._last_stepped = reply.next_step - 1
        self._finished: MiniBatchInfo | None = None
        self._wait_s = 0.0
        self._prefetcher = Prefetcher(
            self._calls,
            first_step=reply.next_step,
            max_bytes=max_prefetch_bytes,
            timeout_s=timeout_s,
        )
        # A stream that is dropped without `close` must not leave its thread behind.
        self._close = weakref.finalize(self, _close, self._prefetcher, self._calls)

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def stepped(self) -> RecoveryToken:
        """Acknowledge the batch whose last mini-batch was just yielded; gives its recovery token.

        Call it after the optimizer's last update of the batch, on dp_rank 0, behind a barrier of
        all ranks. Keep the token in the checkpoint that holds these weights.

        Raises:
            RejectedError: this is not dp_rank 0, or no finished batch waits to be acknowledged.
            FencedError: a newer trainer session took over.
        """
        self._require_rank_0("stepped")
        info = self._finished
        if info is None:
            raise RejectedError(
                "stepped() is for a batch whose last mini-batch was yielded, once; "
                f"the last acknowledged step is {self._last_stepped}"
            )
        token = self._calls.stepped(info.step, manifest_hash=info.manifest_hash)
        self._finished, self._last_stepped = None, info.step
        return RecoveryToken.parse(token)

    def committed(self, token: RecoveryToken | str) -> None:
        """Say that the checkpoint which holds `token` is on disk.

        Raises:
            RejectedError: this is not dp_rank 0, or no stepped batch has this token.
            FencedError: a newer trainer session took over.
        """
        self._require_rank_0("committed")
        self._calls.committed(str(token))

    def announce_version(
        self, version: int, *, step: int | None = None, weights_uri: str = ""
    ) -> None:
        """Say that weights named `version` exist and generators may load them.

        Args:
            version: above `newest_version`.
            step: after which they were made; None: the last stepped one.
            weights_uri: where to load them; "" if they travel another way.

        Raises:
            RejectedError: this is not dp_rank 0, or the version was used before.
            FencedError: a newer trainer session took over.
        """
        self._require_rank_0("announce_version")
        made_after = self._last_stepped if step is None else step
        self._calls.announce_version(version, step=made_after, weights_uri=weights_uri)
        self.newest_version = max(self.newest_version, version)

    def statistics(self) -> StreamStatistics:
        """What was received and what is held, now."""
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
        """Cancel what is pending and give back thread and connection. Safe to call twice."""
        self._close()

    def _require_rank_0(self, call: str) -> None:
        dp_rank = self._calls.share.dp_rank
        if dp_rank != 0:
            raise RejectedError(f"{call}() is for dp_rank 0 alone, and this is dp_rank {dp_rank}")


def _close(prefetcher: Prefetcher, calls: BatcherCalls) -> None:
    prefetcher.close()
    calls.close()


def _check_share(dp_rank: int, *, dp_world_size: int, session: str | None) -> None:
    if not 0 <= dp_rank < dp_world_size:
        raise InvalidConfigError("dp_rank", f"{dp_rank} is not in a world of {dp_world_size}")
    if dp_world_size > 1 and not session:
        raise InvalidConfigError(
            "session", f"{dp_world_size} ranks need a name in common to be one trainer"
        )
