"""A consumer in addition to the trainer: it sees the same batches and controls nothing.

For a critic on other machines, a logger, a dashboard or an evaluation::

    with ObserverStream("localhost:7600", "my-run", "reward-audit") as stream:
        for mini_batch in stream:
            audit(mini_batch)
            if mini_batch.is_last:
                stream.seen()
"""

from __future__ import annotations

import logging

from turnstream.errors import InvalidConfigError
from turnstream.worker._calls import BatcherCalls
from turnstream.worker.stream import GIB, MiniBatches

logger = logging.getLogger(__name__)

LEAST_EXPIRY_S = 10.0
"""With less, an observer that waits for data could expire between two of its calls."""


class ObserverStream(MiniBatches):
    """Mini-batches of a run in order, from the first step that this observer has not seen.

    Payload that it has not seen is kept until it calls `seen`. It expires after `expiry_s` without
    a call, or with one batch; waiting for a batch is no silence. The time advances while a batcher
    leads the run. A new observer with the name of an expired one starts after the last stepped
    step, and logs the missed steps. `first_step` asks for those that are still retained.

    Iteration raises the errors of `BatchStream`, and:
        ObserverExpiredError: it was silent for longer than `expiry_s`.

    Attributes:
        missed: steps that it does not get, because it expired before it had seen them.
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
        expiry_s: float = 600.0,
        timeout_s: float = 600.0,
        max_prefetch_bytes: int = GIB,
        api_key: str | None = None,
    ) -> None:
        """Register the observer, or resume it, and start to pull.

        Args:
            target: as for `BatchStream`.
            run: as for `BatchStream`.
            observer: its name, the same after a restart.
            dp_rank: position of this process among those that share the observer's batches.
            dp_world_size: number of such positions; independent of the trainer's.
            first_step: the first step of a new observer; None: the one after the last stepped.
            expiry_s: longest silence, and longest time for one batch, before the observer expires;
                10 s to 7 days.
            timeout_s: as for `BatchStream`.
            max_prefetch_bytes: as for `BatchStream`.
            api_key: as for `BatchStream`.

        Raises:
            InvalidConfigError: no name, a rank outside the world, a step or expiry that cannot be.
            RunNotFoundError: no run of that name.
            AccessDeniedError: the key is not accepted, or may not read this run.
            BatcherUnavailableError: no batcher answered for `timeout_s`.
        """
        if first_step is not None and first_step < 1:
            raise InvalidConfigError("first_step", f"{first_step}; steps count from 1")
        if not expiry_s >= LEAST_EXPIRY_S:
            raise InvalidConfigError("expiry_s", f"{expiry_s} is not at least {LEAST_EXPIRY_S} s")
        calls = BatcherCalls(
            *(target, run, dp_rank, dp_world_size),
            timeout_s=timeout_s,
            observer=observer,
            api_key=api_key,
        )
        reply = calls.observe(first_step=first_step or 0, expiry_s=expiry_s)
        super().__init__(calls, reply, max_prefetch_bytes=max_prefetch_bytes, timeout_s=timeout_s)
        self.missed = range(reply.first_missed or reply.next_step, reply.next_step)
        if self.missed:
            logger.warning(
                "observer %r of run %s expired, and misses the steps %d to %d",
                observer,
                run,
                self.missed[0],
                self.missed[-1],
            )

    def seen(self) -> int:
        """Acknowledge the batch whose last mini-batch was just yielded; return its step.

        Its payload need no longer be kept. Call it on dp_rank 0, after a barrier of all ranks.

        Raises:
            RejectedError: this is not dp_rank 0, or no finished batch waits to be acknowledged.
            ObserverExpiredError: it was silent for longer than `expiry_s`, or was removed.
            ConflictError: the observer belongs to another API key.
            StoreBehindError: the store lost the batch.
        """
        self._require_rank_0("seen")
        info = self._finished_batch("seen")
        self._calls.observed(info.step)
        self._acknowledged(info)
        return info.step
