"""Extra columns as torch tensors, beside those of any layout.

Shapes: those of `turnstream.batching.extra_layouts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from turnstream.batching.extra_layouts import PlacedColumn
from turnstream.types import Extent


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExtraTensor:
    """An extra column in one layout: see `turnstream.batching.extra_layouts`.

    Attributes:
        per: what it has one value for.
        values: in the type of the column; router choices in the narrowest that holds those of the
            mini-batch: index with `values.long()`.
        is_missing: bool, of "first_tokens" alone: the router padding mask, set where no choice was
            captured and the dummy choice stands.
        num_items: of "items" alone: how many values belong to every row, in order.
    """

    per: Extent
    values: Tensor
    is_missing: Tensor | None = None
    num_items: tuple[int, ...] = ()

    def on_device(self, device: torch.device) -> ExtraTensor:
        """With its tensors there; to a CUDA device through pinned memory, without blocking."""
        return ExtraTensor(
            per=self.per,
            values=_on_device(self.values, device),
            is_missing=None if self.is_missing is None else _on_device(self.is_missing, device),
            num_items=self.num_items,
        )

    def cut(self, rows: Sequence[int], *, columns: Mapping[str, slice]) -> ExtraTensor:
        """Those of some rows of a rectangle.

        Args:
            rows: their positions.
            columns: of the rectangle that are kept, by extent.
        """
        if self.per == "items":
            parts = self.values.split(self.num_items)
            picked = [parts[row] for row in rows]
            values = torch.cat(picked) if picked else self.values[:0]
            counts = tuple(self.num_items[row] for row in rows)
            return ExtraTensor(per=self.per, values=values, num_items=counts)
        index = torch.tensor(rows, dtype=torch.int64, device=self.values.device)
        own = columns.get(self.per)
        values, is_missing = self.values, self.is_missing
        if own is not None:
            values = values[:, own]
            is_missing = None if is_missing is None else is_missing[:, own]
        return ExtraTensor(
            per=self.per,
            values=values[index],
            is_missing=None if is_missing is None else is_missing[index],
        )


def extra_tensors(placed: Mapping[str, PlacedColumn]) -> dict[str, ExtraTensor]:
    """The columns as tensors on the CPU, in the same order."""
    return {
        name: ExtraTensor(
            per=column.per,
            values=_tensor(column.values),
            is_missing=None if column.is_missing is None else _tensor(column.is_missing),
            num_items=() if column.num_items_B is None else tuple(column.num_items_B.tolist()),
        )
        for name, column in placed.items()
    }


def _tensor(values: np.ndarray) -> Tensor:
    """A copy only where the values are a read-only view of the arrived bytes, or not aligned."""
    flags = values.flags
    return torch.from_numpy(values if flags.writeable and flags.aligned else values.copy())


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
