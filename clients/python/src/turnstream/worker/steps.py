"""The steps of `run.batches()`, and their mini-batches.

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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from turnstream.batching.config import BatchingConfig
from turnstream.errors import RejectedError
from turnstream.optional import from_extra
from turnstream.types import MiniBatch, MiniBatchInfo

if TYPE_CHECKING:
    import torch

    from turnstream.worker.layouts import JaggedTensors, PackedTensors, RightPaddedTensors
    from turnstream.worker.stream import BatchStream
    from turnstream.worker.tensors import LeftPaddedTensors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PulledMiniBatch(MiniBatch):
    """One rank's rows of one optimizer update, checked on arrival.

    Tensors are on the CPU, or copied to `device`: through pinned memory to a CUDA device.

    Attributes:
        content_hash: hex SHA-256 over columns and metadata; equal for every replica and retry.
        num_bytes: size of the Arrow encoding on the wire.
    """

    content_hash: str
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the real rows."""
        return int(self.rows.input_ids.lengths[~self.rows.is_padding].sum())

    @property
    def is_last(self) -> bool:
        """Whether this is the last of its batch: after its update, call `BatchStream.stepped()`."""
        return self.info.is_last

    # The layouts are imported by their methods: torch takes a second to load.

    def to_torch(self, device: torch.device | str | None = None) -> LeftPaddedTensors:
        """Return the rows as left-padded tensors."""
        with from_extra("torch", needed_by="to_torch()"):
            from turnstream.worker.tensors import to_torch

        return to_torch(self, device=device)

    def to_torch_right_padded(self, device: torch.device | str | None = None) -> RightPaddedTensors:
        """Return the rows as right-padded tensors."""
        with from_extra("torch", needed_by="to_torch_right_padded()"):
            from turnstream.worker.layouts import right_padded_to_torch

        return right_padded_to_torch(self, device=device)

    def to_torch_packed(
        self, device: torch.device | str | None = None, *, alignment: int | None = None
    ) -> list[PackedTensors]:
        """Return the concatenated rows of every micro-batch.

        Every row begins at a multiple of `alignment`; None takes that of the run.
        """
        with from_extra("torch", needed_by="to_torch_packed()"):
            from turnstream.worker.layouts import packed_to_torch

        return packed_to_torch(self, alignment=alignment, device=device)

    def to_torch_jagged(self, device: torch.device | str | None = None) -> JaggedTensors:
        """Return the rows as flat values and offsets."""
        with from_extra("torch", needed_by="to_torch_jagged()"):
            from turnstream.worker.layouts import jagged_to_torch

        return jagged_to_torch(self, device=device)


class Step:
    """One training step: this rank's share of its mini-batches. Iterate over it once.

    Attributes:
        number: from 1.
        num_mini_batches: optimizer updates of the step.
        state: the state that `done` returned; "" before.
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
        self.state = ""

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
        infos, num_tokens = self._infos, sum(self._num_tokens)
        num_positions = sum(info.width * info.num_real_rows for info in infos)
        weighted = [i.merge_ratio * n for i, n in zip(infos, self._num_tokens, strict=True)]
        found = {
            "padding_share": 1 - num_tokens / num_positions if num_positions else 0.0,
            "merge_ratio": sum(weighted) / num_tokens if num_tokens else 1.0,
            "num_rows": sum(info.num_real_rows for info in infos),
            "num_groups": sum(info.denominators.num_groups for info in infos),
            "num_trained_tokens": sum(info.denominators.num_tokens for info in infos),
            "num_tokens": num_tokens,
            "wait_s": self._stream.statistics().wait_s - self._waited_s,
        }
        oldest = [info.oldest_version for info in infos if info.oldest_version is not None]
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
        if not self.state:
            if not self._is_pulled:
                raise RejectedError(f"step {self.number} has mini-batches that were not taken yet")
            self.state = str(self._stream.stepped())
        return self.state

    def commit(self) -> None:
        """Acknowledge that this rank's part of the checkpoint is on disk, with its `done` state.

        It counts once all ranks have called it; each call returns at once.

        Raises:
            RejectedError: the step is not done.
            FencedError: a newer start of the trainer took over.
        """
        if not self.state:
            raise RejectedError(f"step {self.number} is not done: call done() before commit()")
        self._stream.committed(self.state)


class Batches:
    """The steps of a run, in order, as made by `Run.batches`; it raises what `BatchStream` does.

    Every rank iterates, and calls `done()` and `commit()` of every step; no barrier is needed.
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
        if self._step is not None and not self._step.state:
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

    def close(self) -> None:
        """Disconnect. Safe to call twice."""
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
