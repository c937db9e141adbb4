"""A run as an iterator of steps, with two acknowledgements per step.

with run.batches(state=checkpoint.get("turnstream")) as batches:
    for step in batches:
        for mini_batch in step:
            train(mini_batch.to_torch("cuda"), mini_batch.denominators)
        state = step.done()
        save({"model": model.state_dict(), "turnstream": state})
        step.commit()
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from turnstream.batching.config import BatchingConfig
from turnstream.errors import RejectedError
from turnstream.types import MiniBatchInfo
from turnstream.worker.mini_batch import PulledMiniBatch, step_totals
from turnstream.worker.stream import BatchStream, StreamStatistics


class Batches:
    """The steps of a run, in order, as made by `Run.batches`; it raises what `BatchStream` does.

    Every rank iterates, and calls `done()` and `commit()` of every step; no barrier is needed.

    Args:
        stream: with `every_rank`; closed with this.
    """

    def __init__(self, stream: BatchStream) -> None:
        self._stream = stream
        self._step: Step | None = None

    @property
    def config(self) -> BatchingConfig:
        """The settings of the run."""
        return self._stream.config

    @property
    def newest_version(self) -> int:
        """The highest policy version announced so far; -1: none. Never announce one twice."""
        return self._stream.newest_version

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Step:
        if self._step is not None and not self._step.is_done:
            raise RejectedError(
                f"step {self._step.number} is not done: call done() after its last mini-batch, "
                "then take the next step"
            )
        waited_s = self._stream.statistics().wait_s
        first = next(self._stream)
        self._step = Step(self._stream, first, waited_s=waited_s)
        return self._step

    def announce_version(
        self, version: int, *, step: int | None = None, weights_uri: str = ""
    ) -> None:
        """Announce weights named `version`; see `BatchStream.announce_version`."""
        self._stream.announce_version(version, step=step, weights_uri=weights_uri)

    def statistics(self) -> StreamStatistics:
        """Return numbers of the received and the queued mini-batches."""
        return self._stream.statistics()

    def close(self) -> None:
        """Disconnect. Safe to call twice."""
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Step:
    """One training step: this rank's share of its mini-batches. Iterate over it once.

    Attributes:
        number: from 1.
        num_mini_batches: optimizer updates of the step.
    """

    def __init__(self, stream: BatchStream, first: PulledMiniBatch, *, waited_s: float) -> None:
        self.number = first.info.step
        self.num_mini_batches = first.info.num_mini_batches
        self._stream = stream
        self._waited_s = waited_s
        self._infos: list[MiniBatchInfo] = []
        self._num_tokens: list[int] = []
        self._mini_batches = self._pull(first)
        self._is_pulled = False
        self._state = ""

    def __iter__(self) -> Iterator[PulledMiniBatch]:
        return self._mini_batches

    def _pull(self, first: PulledMiniBatch) -> Iterator[PulledMiniBatch]:
        mini_batch = first
        while True:
            self._infos.append(mini_batch.info)
            self._num_tokens.append(mini_batch.num_tokens)
            self._is_pulled = mini_batch.is_last
            yield mini_batch
            if self._is_pulled:
                return
            mini_batch = next(self._stream)

    @property
    def is_done(self) -> bool:
        """Whether `done` has returned."""
        return bool(self._state)

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers of the mini-batches so far, for a dashboard.

        Over all ranks:
            merge_ratio: tokens of the separate turns / tokens of the rows.
            num_groups, num_trained_tokens: totals.
            staleness: versions between the newest announced one and the oldest of a trained token;
                absent if versions are unknown.
        Over this rank:
            num_rows, num_tokens: totals.
            padding_share: 0 to 1.
            wait_s: seconds without data.
        """
        found = step_totals(self._infos, self._num_tokens)
        found["wait_s"] = self._stream.statistics().wait_s - self._waited_s
        oldest = [i.oldest_version for i in self._infos if i.oldest_version is not None]
        if oldest and self._stream.newest_version >= 0:
            found["staleness"] = self._stream.newest_version - min(oldest)
        return found

    def done(self) -> str:
        """Acknowledge the step and return the state for the checkpoint of these weights.

        Returns once all ranks have called it; all get the same. The same call again returns the
        same.

        Raises:
            RejectedError: the step has mini-batches that were not iterated over.
            NotReadyError: the named rank has not called it within `timeout_s`.
            FencedError: a newer start of the trainer took over.
            StoreBehindError, ConflictError: the store lost this step, or one before it.
        """
        if not self._state:
            if not self._is_pulled:
                raise RejectedError(f"step {self.number} has mini-batches that were not taken yet")
            self._state = str(self._stream.stepped())
        return self._state

    def commit(self) -> None:
        """Acknowledge that this rank's part of the checkpoint is on disk, with its `done` state.

        It counts once all ranks have called it; each call returns at once.

        Raises:
            RejectedError: the step is not done.
            FencedError: a newer start of the trainer took over.
        """
        if not self._state:
            raise RejectedError(f"step {self.number} is not done: call done() before commit()")
        self._stream.committed(self._state)
