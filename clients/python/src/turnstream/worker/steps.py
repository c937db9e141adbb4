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
from turnstream.worker.mini_batch import PulledMiniBatch
from turnstream.worker.stream import BatchStream, StreamStatistics


class Batches:
    """The steps of a run, in order; an iterator and a context manager.

    Made by `Run.batches`. Iteration ends when the run is closed and its last step is done. It
    raises the errors of `BatchStream`.

    Every rank iterates, and calls `done()` and `commit()` of every step; no barrier is needed.
    """

    def __init__(self, stream: BatchStream) -> None:
        """Take over a stream with `every_rank`."""
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
        self._num_positions = self._num_tokens = self._num_rows = 0
        self._num_groups = self._num_trained = 0
        self._merge = 0.0
        self._versions: list[int] = []
        self._mini_batches = self._pull(first)
        self._is_pulled = False
        self._state = ""

    def __iter__(self) -> Iterator[PulledMiniBatch]:
        return self._mini_batches

    def _pull(self, first: PulledMiniBatch) -> Iterator[PulledMiniBatch]:
        mini_batch = first
        while True:
            self._count(mini_batch)
            self._is_pulled = mini_batch.is_last
            yield mini_batch
            if self._is_pulled:
                return
            mini_batch = next(self._stream)

    def _count(self, mini_batch: PulledMiniBatch) -> None:
        """Add a mini-batch to the metrics."""
        info, rows = mini_batch.info, mini_batch.rows
        num_tokens = int(rows.input_ids.lengths[~rows.is_padding].sum())
        self._num_positions += info.width * info.num_real_rows
        self._num_tokens += num_tokens
        self._merge += info.merge_ratio * num_tokens
        self._num_rows += info.num_real_rows
        self._num_groups += info.denominators.num_groups
        self._num_trained += info.denominators.num_tokens
        if info.oldest_version is not None:
            self._versions.append(info.oldest_version)

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
        num_tokens, num_positions = self._num_tokens, self._num_positions
        found: dict[str, float] = {
            "padding_share": 1 - num_tokens / num_positions if num_positions else 0.0,
            "merge_ratio": self._merge / num_tokens if num_tokens else 1.0,
            "num_rows": self._num_rows,
            "num_groups": self._num_groups,
            "num_trained_tokens": self._num_trained,
            "num_tokens": num_tokens,
            "wait_s": self._stream.statistics().wait_s - self._waited_s,
        }
        if self._versions and self._stream.newest_version >= 0:
            found["staleness"] = self._stream.newest_version - min(self._versions)
        return found

    def done(self) -> str:
        """Acknowledge that this rank's optimizer has taken the last update of the step.

        Returns once all ranks have called it; the batcher then counts the step as trained. The
        same call again returns the same.

        Returns:
            The state for the checkpoint that holds these weights, the same on all ranks.

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

        It counts once all ranks have called it; each call returns at once. The batcher then
        deletes payload that no retained checkpoint needs.

        Raises:
            RejectedError: the step is not done.
            FencedError: a newer start of the trainer took over.
        """
        if not self._state:
            raise RejectedError(f"step {self.number} is not done: call done() before commit()")
        self._stream.committed(self._state)
