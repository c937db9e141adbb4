"""A mini-batch at a worker: rows, their metadata, and the conversion to tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from turnstream.optional import from_extra
from turnstream.types import MiniBatch, MiniBatchInfo

if TYPE_CHECKING:
    import torch

    from turnstream.worker.layouts import JaggedTensors, PackedTensors, RightPaddedTensors
    from turnstream.worker.tensors import LeftPaddedTensors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PulledMiniBatch(MiniBatch):
    """One rank's rows of one optimizer update, checked on arrival.

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

    def to_torch(self, device: torch.device | str | None = None) -> LeftPaddedTensors:
        """Return the rows as left-padded tensors, on the CPU or copied to `device`.

        To a CUDA device the copies go through pinned memory and do not block.
        """
        # Imported here: torch takes a second to load, and pulling does not need it.
        with from_extra("torch", needed_by="to_torch()"):
            from turnstream.worker.tensors import to_torch

        return to_torch(self, device=device)

    def to_torch_right_padded(self, device: torch.device | str | None = None) -> RightPaddedTensors:
        """Return the rows as right-padded tensors, on the CPU or copied to `device`."""
        with from_extra("torch", needed_by="to_torch_right_padded()"):
            from turnstream.worker.layouts import right_padded_to_torch

        return right_padded_to_torch(self, device=device)

    def to_torch_packed(
        self, device: torch.device | str | None = None, *, alignment: int | None = None
    ) -> list[PackedTensors]:
        """Return the concatenated rows of every micro-batch, on the CPU or copied to `device`.

        Every row begins at a multiple of `alignment`; None takes that of the run.
        """
        with from_extra("torch", needed_by="to_torch_packed()"):
            from turnstream.worker.layouts import packed_to_torch

        return packed_to_torch(self, alignment=alignment, device=device)

    def to_torch_jagged(self, device: torch.device | str | None = None) -> JaggedTensors:
        """Return the rows as flat values and offsets, on the CPU or copied to `device`."""
        with from_extra("torch", needed_by="to_torch_jagged()"):
            from turnstream.worker.layouts import jagged_to_torch

        return jagged_to_torch(self, device=device)


def step_totals(infos: Sequence[MiniBatchInfo], num_tokens: Sequence[int]) -> dict[str, float]:
    """Return the totals of a step by the names of `Step.metrics`.

    `num_tokens` are the tokens of the real rows of each mini-batch, on this rank.
    """
    total = sum(num_tokens)
    positions = sum(info.width * info.num_real_rows for info in infos)
    turn_tokens = sum(i.merge_ratio * n for i, n in zip(infos, num_tokens, strict=True))
    return {
        "padding_share": 1 - total / positions if positions else 0.0,
        "merge_ratio": turn_tokens / total if total else 1.0,
        "num_rows": sum(info.num_real_rows for info in infos),
        "num_groups": sum(info.denominators.num_groups for info in infos),
        "num_trained_tokens": sum(info.denominators.num_tokens for info in infos),
        "num_tokens": total,
    }
