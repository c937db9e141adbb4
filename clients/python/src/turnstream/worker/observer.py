"""A consumer beside the trainer: the same batches, none of the say.

For a critic on other machines, a logger, a dashboard, an evaluation of what is trained::

    with ObserverStream("localhost:7600", "my-run", "reward-audit") as stream:
        for mini_batch in stream:
            look_at(mini_batch)
            if mini_batch.is_last:
                stream.seen()
"""

from __future__ import annotations

import logging

from turnstream.errors import InvalidConfigError
from turnstream.records.configs import decode_config
from turnstream.worker._calls import BatcherCalls, Share
from turnstream.worker._stream import GIB, MiniBatches, check_rank

logger = logging.getLogger(__name__)

EXPIRY_S = 600.0

LEAST_EXPIRY_S = 10.0
"""Below it, an observer that waits for data could expire between two of its calls."""


class ObserverStream(MiniBatches):
    """Mini-batches of a run in order, from the first step that this observer has not seen.

    An observer drives neither planning nor versions nor the ledger. Payload that it has not seen
    is kept for it while it lives: while it waits for a batch that is not there yet, and for
    `expiry_s` beyond that for each that it was given, until it says `seen`. One that is silent for
    longer, or hangs over a batch, is forgotten, and told so. The time is the run's, which goes on
    while a batcher leads it, whatever clocks are set to.

    One that begins again under the name of a forgotten one begins anew. What it missed is logged
    as a warning, and said in `missed`, until it has seen a batch; with `first_step` it may ask for
    those of the steps that are still retained. Of more than 256 forgotten names, those that had
    seen least are not known any more.

    Iteration raises, beside what `BatchStream` raises:
        ObserverExpiredError: it was silent for longer than `expiry_s`.

    Attributes:
        config: of the run.
        lineage: the history of the run as it was when this began.
        missed: steps that it does not get, because it was forgotten before it had seen them.
    """

    def __init__(
        self,
        target: str,
        run: str,
        observer: str,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        *,
        first_step: int | None = None,
        expiry_s: float = EXPIRY_S,
        timeout_s: float = 600.0,
        max_prefetch_bytes: int = GIB,
    ) -> None:
        """Declare the observer, or come back as it, and start to pull.

        Args:
            target: gRPC address of a batcher, "host:port"; several replicas with commas.
            run: name of the run. The observer stays with the run that has the name now, also after
                that was deleted and another one created.
            observer: its name, the same after a restart.
            dp_rank: position of this process among those that share the observer's batches.
            dp_world_size: number of such positions, whatever the trainer has.
            first_step: that a new observer begins with; None: the one after the last stepped.
            expiry_s: an observer that is silent for so long, or that long over one batch, is
                forgotten; 10 or more.
            timeout_s: longest wait for a mini-batch, or for an acknowledgement to be taken.
            max_prefetch_bytes: bound of what is pulled ahead.

        Raises:
            InvalidConfigError: no name, a rank outside the world, a step or expiry that cannot be.
            RunNotFoundError: no run of that name.
            BatcherUnavailableError: no batcher answered for `timeout_s`.
        """
        check_rank(dp_rank, dp_world_size=dp_world_size)
        if first_step is not None and first_step < 1:
            raise InvalidConfigError("first_step", f"{first_step}; steps count from 1")
        if not expiry_s >= LEAST_EXPIRY_S:
            raise InvalidConfigError("expiry_s", f"{expiry_s} is not at least {LEAST_EXPIRY_S} s")
        share = Share(run=run, dp_rank=dp_rank, dp_world_size=dp_world_size, observer=observer)
        calls = BatcherCalls(target, share=share, timeout_s=timeout_s)
        try:
            reply = calls.observe(first_step=first_step or 0, expiry_s=expiry_s)
            config = decode_config(reply.config_json)
        except BaseException:
            calls.close()
            raise
        super().__init__(
            calls,
            first_step=reply.next_step,
            config=config,
            lineage=reply.lineage,
            max_prefetch_bytes=max_prefetch_bytes,
            timeout_s=timeout_s,
        )
        self.missed = range(reply.first_missed or reply.next_step, reply.next_step)
        if self.missed:
            logger.warning(
                "observer %r of run %s was forgotten, and misses the steps %d to %d",
                observer,
                run,
                self.missed[0],
                self.missed[-1],
            )

    def seen(self) -> int:
        """Say that the batch whose last mini-batch was just yielded need not be kept any more.

        Gives its step. On dp_rank 0, behind a barrier of all ranks.

        Raises:
            RejectedError: this is not dp_rank 0, or no finished batch waits to be acknowledged.
            ObserverExpiredError: it was silent for too long before.
        """
        info = self._finished_batch("seen")
        self._calls.observed(info.step)
        self._acknowledged(info)
        return info.step
