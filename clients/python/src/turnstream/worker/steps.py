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

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, Self

import numpy as np

from turnstream.batching.config import BatchingConfig
from turnstream.errors import InvalidConfigError, RejectedError
from turnstream.optional import from_extra
from turnstream.types import MiniBatch, MiniBatchInfo, MiniBatchTotals
from turnstream.types.names import whole_number

if TYPE_CHECKING:
    import torch

    from turnstream.worker.layouts import JaggedTensors, PackedTensors, RightPaddedTensors
    from turnstream.worker.stream import BatchStream
    from turnstream.worker.tensors import LeftPaddedTensors

_MAX_EPOCHS: Final = 2**31
_MAX_SEED: Final = 2**64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PulledMiniBatch(MiniBatch):
    """One rank's rows of one optimizer update, checked on arrival.

    Tensors are on the CPU, or copied to `device`: through pinned memory to a CUDA device.

    Attributes:
        content_hash: hex XXH3-128 over columns and metadata; equal for every replica and retry. A
            batcher of an earlier release sends SHA-256.
        num_bytes: size of the Arrow encoding on the wire.
        epoch: number of the pass over its step, from 0; see `Step.mini_batches`.
    """

    content_hash: str
    num_bytes: int
    epoch: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the real rows."""
        return int(self.rows.input_ids.lengths[~self.rows.is_padding].sum())

    def num_positions(self, *, layout: Literal["padded", "packed"]) -> int:
        """Return the positions of the real rows in the forward passes of a layout.

        The rows of a padded pass have the width of its longest row. A packed row takes a multiple
        of the alignment of the run.
        """
        lengths_B = np.where(self.rows.is_padding, 0, self.rows.input_ids.lengths)
        if layout == "packed":
            alignment = self.info.alignment
            return int((-(-lengths_B // alignment) * alignment).sum())
        passes = [lengths_B[list(each)] for each in self.info.micro_batches]
        return sum(int(each.max(initial=0)) * int(np.count_nonzero(each)) for each in passes)

    @property
    def num_masked_tokens(self) -> int:
        """Tokens of the real rows of trajectories that train no token."""
        is_masked_B = ~self.rows.is_padding & (self.rows.trajectory_num_tokens == 0)
        return int(self.rows.input_ids.lengths[is_masked_B].sum())

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
    """One training step: this rank's share of its mini-batches.

    Iterate over it once: with `for mini_batch in step`, or with `mini_batches` for several epochs.
    After an error such as NotReadyError, the same loop resumes at the mini-batch that did not come.

    Attributes:
        number: from 1.
        num_mini_batches: optimizer updates of each epoch of the step.
        state: the state that `done` returned; "" before.
    """

    def __init__(self, stream: BatchStream, first: PulledMiniBatch, *, waited_s: float) -> None:
        self.number = first.info.step
        self.num_mini_batches = first.info.num_mini_batches
        self._stream = stream
        self._waited_s = waited_s
        self._infos: list[MiniBatchInfo] = []
        self._num_tokens: list[int] = []
        self._num_positions = 0
        self._num_masked = 0
        self._first: PulledMiniBatch | None = first
        self._mini_batches: Iterator[PulledMiniBatch] | None = None
        self._is_taken = False
        self.state = ""
        self._version_before = -1

    def __iter__(self) -> Iterator[PulledMiniBatch]:
        if self._mini_batches is None:
            return self.mini_batches()
        return self._mini_batches

    def mini_batches(
        self, *, epochs: int = 1, shuffle_seed: int | None = None
    ) -> Iterator[PulledMiniBatch]:
        """Iterate `epochs` times over the mini-batches of the step; `mini_batch.epoch` counts.

        The first epoch yields each mini-batch as it arrives. Later epochs yield the same arrays
        again, without a copy. With more than one epoch, all mini-batches of this rank stay in
        memory, in addition to `max_prefetch_bytes`. The last epoch releases each one it yields.

            for mini_batch in step.mini_batches(epochs=2):
                update(mini_batch)
            state = step.done()

        Args:
            epochs: number of passes, at least 1.
            shuffle_seed: draws the order of each later epoch by `epoch_order`, the same on all
                ranks; None keeps the order of the first epoch.

        Raises:
            InvalidConfigError: a value is no such number.
            RejectedError: an iteration over the step has already started.
        """
        refusal = InvalidConfigError
        whole_number(epochs, field="epochs", least=1, limit=_MAX_EPOCHS, refusal=refusal)
        if shuffle_seed is not None:
            whole_number(shuffle_seed, field="shuffle_seed", limit=_MAX_SEED, refusal=refusal)
        if self._mini_batches is not None:
            raise RejectedError(f"step {self.number}: an iteration over it has already started")
        self._mini_batches = _Epochs(self, epochs=epochs, shuffle_seed=shuffle_seed)
        return self._mini_batches

    def _arrive(self) -> PulledMiniBatch | None:
        """Return the next mini-batch, None after the last. An error leaves all as it was."""
        if self._first is not None:
            mini_batch, self._first = self._first, None
        elif self._infos[-1].is_last:
            return None
        else:
            mini_batch = next(self._stream)
        self._infos.append(mini_batch.info)
        self._num_tokens.append(mini_batch.num_tokens)
        self._num_positions += mini_batch.num_positions(layout="padded")
        self._num_masked += mini_batch.num_masked_tokens
        return mini_batch

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers of the mini-batches so far, for a dashboard. Each counts once, in any epoch.

        Over all ranks:
            reward_mean: mean planned reward of the trajectories.
            num_trajectories, num_groups, num_rows, num_tokens, num_trained_tokens: totals.
            merge_ratio: tokens of the separate turns / tokens of the rows.
            staleness: versions between the newest one announced before the step and the oldest of a
                trained token; absent if versions are unknown, or above the newest announced one. On
                other ranks than 0 it is there once the step is done.
        Over this rank:
            padding_share: 0 to 1, of the positions of its padded forward passes.
            masked_share: share of its tokens in trajectories that train no token, 0 to 1.
            wait_s: seconds without data.

        A batch of an older release has no `reward_mean`, `num_trajectories`, `num_rows` and
        `num_tokens`.
        """
        infos, num_tokens = self._infos, sum(self._num_tokens)
        weighted = [i.merge_ratio * n for i, n in zip(infos, self._num_tokens, strict=True)]
        found = {
            "padding_share": 1 - num_tokens / self._num_positions if num_tokens else 0.0,
            "merge_ratio": sum(weighted) / num_tokens if num_tokens else 1.0,
            "masked_share": self._num_masked / num_tokens if num_tokens else 0.0,
            "num_groups": sum(info.denominators.num_groups for info in infos),
            "num_trained_tokens": sum(info.denominators.num_tokens for info in infos),
            "wait_s": self._stream.statistics().wait_s - self._waited_s,
            **_of_all_ranks([info.totals for info in infos]),
        }
        oldest = [info.oldest_version for info in infos if info.oldest_version is not None]
        newest = self._version_before if self.state else self._stream.announced_version
        if oldest and newest >= 0:
            staleness = newest - min(oldest)
            if staleness >= 0:
                found["staleness"] = staleness
        return found

    def done(self) -> str:
        """Acknowledge the step and return the state for the checkpoint of these weights.

        Returns once all ranks have called it; all get the same. The same call again returns the
        same.

        Raises:
            RejectedError: the step has mini-batches that were not iterated over, in some epoch.
            NotReadyError: the named rank has not called it within `timeout_s`.
            FencedError: a newer start of the trainer took over.
            StoreBehindError, ConflictError: the store lost this step, or one before it.
        """
        if not self.state:
            if not self._is_taken:
                raise RejectedError(
                    f"step {self.number} has mini-batches that were not taken yet: iterate to the "
                    "end of its last epoch"
                )
            self.state = str(self._stream.stepped())
            self._version_before = self._stream.version_before
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


def _of_all_ranks(totals: Sequence[MiniBatchTotals | None]) -> dict[str, float]:
    """Return the numbers of a step from the totals of its mini-batches; empty if one has none."""
    known = [each for each in totals if each is not None]
    if not known or len(known) < len(totals):
        return {}
    num_tokens = sum(each.num_tokens for each in known)
    num_trajectories = sum(each.num_trajectories for each in known)
    return {
        "reward_mean": math.fsum(each.reward_sum for each in known) / num_trajectories,
        "num_trajectories": num_trajectories,
        "num_rows": sum(each.num_rows for each in known),
        "num_tokens": num_tokens,
        "merge_ratio": sum(each.num_turn_tokens for each in known) / num_tokens,
    }


class _Epochs(Iterator[PulledMiniBatch]):
    """The mini-batches of a step in each epoch; an error of its stream does not end it."""

    def __init__(self, step: Step, *, epochs: int, shuffle_seed: int | None) -> None:
        self._step = step
        self._epochs = epochs
        self._shuffle_seed = shuffle_seed
        self._kept: dict[int, PulledMiniBatch] = {}
        self._later: Iterator[PulledMiniBatch] | None = None

    def __next__(self) -> PulledMiniBatch:
        if self._later is None:
            mini_batch = self._step._arrive()
            if mini_batch is not None:
                if self._epochs > 1:
                    self._kept[mini_batch.info.mini_batch] = mini_batch
                self._step._is_taken = self._epochs == 1 and mini_batch.is_last
                return mini_batch
            self._later = self._repeat()
        return next(self._later)

    def _repeat(self) -> Iterator[PulledMiniBatch]:
        kept, step = self._kept, self._step
        for epoch in range(1, self._epochs):
            order = list(range(len(kept)))
            if self._shuffle_seed is not None:
                order = epoch_order(
                    len(kept), seed=self._shuffle_seed, step=step.number, epoch=epoch
                )
            for index in order:
                mini_batch = kept[index] if epoch + 1 < self._epochs else kept.pop(index)
                step._is_taken = not kept
                yield replace(mini_batch, epoch=epoch)


def epoch_order(num_mini_batches: int, *, seed: int, step: int, epoch: int) -> list[int]:
    """Return the order of the mini-batches in one epoch, a permutation of their indices.

    It depends on the arguments alone, so all ranks and releases have the same one: mini-batches are
    sorted by a SHA-256 of seed, step, epoch and index.

    >>> epoch_order(4, seed=0, step=1, epoch=1), epoch_order(4, seed=0, step=1, epoch=2)
    ([3, 0, 1, 2], [3, 1, 2, 0])
    """

    def key(index: int) -> bytes:
        return hashlib.sha256(f"{seed}/{step}/{epoch}/{index}".encode()).digest()

    return sorted(range(num_mini_batches), key=key)


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
    def run(self) -> str:
        """The id of the run."""
        return self._stream.run

    @property
    def newest_version(self) -> int:
        """The highest policy version announced so far; -1: none. Never announce one twice.

        Other ranks than 0 know those before the last step that is done.
        """
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
