"""The worker's end of the data path: an iterator of mini-batches, and the acknowledgements.

Ten lines in anybody's training loop::

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
import uuid
from collections.abc import Iterator

from turnstream.errors import InvalidConfigError, RunNotFoundError, StoreBehindError
from turnstream.records.configs import decode_config
from turnstream.types import RecoveryToken
from turnstream.worker._calls import BatcherCalls, Share
from turnstream.worker._stream import GIB, MiniBatches, StreamStatistics, check_rank
from turnstream.worker.mini_batch import PulledMiniBatch

__all__ = ["BatchStream", "StreamStatistics"]


class BatchStream(MiniBatches):
    """Mini-batches of a run in order, from the step after `recovery_token`.

    One thread pulls ahead, at most `max_prefetch_bytes`. A batcher that is away is called again
    with back-off; a cut or damaged transfer is fetched again and what was already yielded is not
    yielded twice. Iteration ends when the run is closed and its last batch is stepped.

    Iteration raises:
        NotReadyError: no data for `timeout_s`; carries the batcher's reason. Iterating again waits
            again.
        BatcherUnavailableError: no batcher answered for `timeout_s`.
        CorruptRecordError: the same mini-batch arrived damaged several times in a row.
        BatchingError: rows that cannot be part of the mini-batch's shipped denominators.
        FencedError: a newer trainer session took over.
        StoreBehindError: the store lost a batch that this trainer had, or the whole run, from
            RunNotFoundError: then it names the newest steps that were stepped and committed.

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
        every_rank: bool = False,
    ) -> None:
        """Begin a trainer session and start to pull.

        Args:
            target: gRPC address of a batcher, "host:port"; several replicas with commas.
            run: name of the run. The session stays with the run that has the name now, also after
                that was deleted and another one created.
            dp_rank: data-parallel position of this process.
            dp_world_size: number of such positions.
            recovery_token: as it was kept in the checkpoint; None starts from the beginning.
            session: a name that all ranks of this trainer share, and no earlier one had.
                Needed with several ranks; beginning a session fences the one before.
            timeout_s: longest wait for a mini-batch, or for an acknowledgement to be taken.
            max_prefetch_bytes: bound of what is pulled ahead.
            every_rank: whether every rank calls `stepped` and `committed`, without a barrier:
                either counts once all ranks have called. Else dp_rank 0 alone calls.

        Raises:
            InvalidConfigError: a rank outside the world, several ranks without a session, or a name
                that is no valid Unicode.
            RunNotFoundError: no run of that name.
            StoreBehindError: the store does not know the token, or has no such run any more.
            BatcherUnavailableError: no batcher answered for `timeout_s`.
        """
        _check_share(dp_rank, dp_world_size=dp_world_size, session=session)
        share = Share(run=run, dp_rank=dp_rank, dp_world_size=dp_world_size)
        calls = BatcherCalls(target, share=share, timeout_s=timeout_s, for_one_rank=every_rank)
        try:
            reply = calls.start(
                recovery_token="" if recovery_token is None else str(recovery_token),
                session=session or uuid.uuid4().hex,
            )
            config = decode_config(reply.config_json)
        except BaseException:
            calls.close()
            raise
        self.newest_version: int = reply.newest_version
        self._newest_had = self._newest_committed = reply.next_step - 1
        super().__init__(
            calls,
            first_step=reply.next_step,
            config=config,
            lineage=reply.lineage,
            max_prefetch_bytes=max_prefetch_bytes,
            timeout_s=timeout_s,
            every_rank=every_rank,
        )

    def __next__(self) -> PulledMiniBatch:
        with self._telling_of_loss():
            mini_batch = super().__next__()
        self._newest_had = mini_batch.info.step
        return mini_batch

    def stepped(self) -> RecoveryToken:
        """Acknowledge the batch whose last mini-batch was just yielded; gives its recovery token.

        Call it after the optimizer's last update of the batch: on dp_rank 0, behind a barrier of
        all ranks, or on every rank of a stream with `every_rank`, where it returns once all ranks
        have called. Keep the token in the checkpoint that holds these weights.

        Raises:
            NotReadyError: a rank has not called it within `timeout_s`, and which.
            RejectedError: this is not dp_rank 0, or no finished batch waits to be acknowledged.
            FencedError: a newer trainer session took over.
            StoreBehindError, ConflictError: the store lost this step or one before it, and has no
                such batch, or another one; or it lost the run.
        """
        info = self._finished_batch("stepped")
        with self._telling_of_loss():
            token = self._steps.say(info.step, manifest_hash=info.manifest_hash)
        self._acknowledged(info)
        return RecoveryToken.parse(token)

    def committed(self, token: RecoveryToken | str) -> None:
        """Say that the checkpoint which holds `token` is on disk.

        Raises:
            RejectedError: this is not dp_rank 0, or no stepped batch has this token.
            FencedError: a newer trainer session took over.
            StoreBehindError: the store lost the run.
        """
        self._check_speaker("committed")
        with self._telling_of_loss():
            self._steps.insist(lambda: self._calls.committed(str(token)))
        step = RecoveryToken.parse(str(token)).step
        self._newest_committed = max(self._newest_committed, step)

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
            StoreBehindError: the store lost the run.
        """
        self._require_rank_0("announce_version")
        made_after = self._last_acknowledged if step is None else step
        with self._telling_of_loss():
            self._calls.announce_version(version, step=made_after, weights_uri=weights_uri)
        self.newest_version = max(self.newest_version, version)

    @contextlib.contextmanager
    def _telling_of_loss(self) -> Iterator[None]:
        """Inside, a run that is no more is one that the store lost, where it had been trained."""
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
        """What this rank knows of how far its trainer is."""
        dp_rank = self._calls.share.dp_rank
        if dp_rank:
            return f"dp_rank {dp_rank} of this trainer had step {self._newest_had}"
        return (
            f"this trainer had stepped to {self._last_acknowledged} "
            f"and committed {self._newest_committed}"
        )


def _check_share(dp_rank: int, *, dp_world_size: int, session: str | None) -> None:
    check_rank(dp_rank, dp_world_size=dp_world_size)
    if dp_world_size > 1 and not session:
        raise InvalidConfigError(
            "session", f"{dp_world_size} ranks need a name in common to be one trainer"
        )
