"""The shares of a rank of the worker, pulled from batcher replicas."""

from __future__ import annotations

from typing import Self

from turnstream.store.run.batchers import Target
from turnstream.worker.operation_pulls import OperationPuller
from turnstream_server.engine.shares import OperationShare
from turnstream_server.operations.log import Run
from turnstream_server.trainer.operations import OperationLoss


class OperationStream:
    """Reads the shares of one rank: a `ReadShares`, and a context manager.

    Args:
        target: the batcher replicas, as for `OperationPuller`.
        dp_rank, dp_world_size: this rank, and the number of ranks.
        timeout_s: longest time of a read with its retries.
    """

    def __init__(
        self, target: Target, *, dp_rank: int, dp_world_size: int, timeout_s: float = 120.0
    ) -> None:
        self._puller = OperationPuller(
            target, dp_rank=dp_rank, dp_world_size=dp_world_size, timeout_s=timeout_s
        )

    def __call__(
        self, model_id: str, run: Run, skipped: frozenset[int] = frozenset()
    ) -> list[OperationShare]:
        """Return the shares of training calls, in the order of the passes; errors as of `pull`."""
        pulled = self._puller.pull(model_id, first=run.first, last=run.last, skipped=skipped)
        return [
            OperationShare(each.mini_batch, OperationLoss(name=each.loss, settings=each.settings))
            for each in pulled
        ]

    def close(self) -> None:
        """Close all connections."""
        self._puller.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
