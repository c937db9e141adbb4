"""Keys and values of running sequences, in buffers that rows join and quit at any step.

Shapes: B rows, H heads, C columns of the buffers, T cached tokens of a row, D size of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer


class LayerStates(NamedTuple):
    """Keys and values of one sequence in one layer: (H, T, D)."""

    keys_HTD: Tensor
    values_HTD: Tensor


Cells = tuple[slice, slice, slice]

PrefixStates = list[LayerStates]
"""Keys and values of one sequence, for every layer."""


def prefix_states(cache: DynamicCache, *, row: int, length: int) -> PrefixStates:
    """Return the first `length` tokens of a row of a cache, in its memory."""
    states: PrefixStates = []
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer)
        assert layer.keys is not None
        assert layer.values is not None
        states.append(LayerStates(layer.keys[row, :, :length], layer.values[row, :, :length]))
    return states


class RowCache:
    """The cache of all running sequences.

    Rows are right-aligned: the newest token of every row is in the same column. So the distance of
    two columns is the distance of their positions, as attention with a sliding window needs it.
    A decode step writes one column in place. Buffers are a quarter larger than needed, so that few
    steps copy them. `lengths` are the cached tokens of every row.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self._layers: list[_RightAlignedLayer] = []

    def append(self, states: PrefixStates) -> None:
        """Add a row after the last one."""
        if not self.lengths:
            self._layers = [_RightAlignedLayer(own) for own in states]
        row, width = len(self.lengths), self._width()
        self.lengths.append(states[0].keys_HTD.shape[1])
        for layer, own in zip(self._layers, states, strict=True):
            layer.reserve(row + 1, width=self._width(), kept_rows=row, kept_width=width)
            layer.write_row(row, own)

    def remove(self, row: int) -> None:
        """Remove a row; the last row takes its place. The buffers of no rows are freed."""
        last = len(self.lengths) - 1
        for layer in self._layers:
            layer.copy_row(last, to=row)
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        if not self.lengths:
            self._layers = []

    def states(self, row: int) -> PrefixStates:
        """Return a copy of the keys and values of a row."""
        return [layer.read_row(row, length=self.lengths[row]) for layer in self._layers]

    def next_step(self) -> tuple[Cache, dict[str, Tensor]]:
        """Return the cache for one more token per row, and the arguments of the forward pass.

        The arguments are int64: `position_ids` (B, 1) and `attention_mask` (B, C). The forward
        pass itself adds the token to the cache.
        """
        width, rows = self._width(), len(self.lengths)
        for layer in self._layers:
            layer.reserve(rows, width=width, kept_rows=rows, kept_width=width)
            layer.show(rows, width=width)
        lengths_B1 = torch.tensor(self.lengths, device=self._layers[0].device)[:, None]
        columns_C = torch.arange(width + 1, device=lengths_B1.device)
        mask_BC = (columns_C >= width - lengths_B1).long()
        self.lengths = [length + 1 for length in self.lengths]
        layers: list[Any] = list(self._layers)
        return Cache(layers=layers), {"position_ids": lengths_B1, "attention_mask": mask_BC}

    def _width(self) -> int:
        return max(self.lengths, default=0)


class _RightAlignedLayer(DynamicLayer):
    """Buffers (B, H, C, D) of one layer. The newest tokens end before column `_end`."""

    def __init__(self, like: LayerStates) -> None:
        super().__init__()
        self.device, self.dtype = like.keys_HTD.device, like.keys_HTD.dtype
        self._keys, self._values = (each[None, :, :0].repeat(0, 1, 1, 1) for each in like)
        self._rows = self._begin = self._end = 0

    def reserve(self, num_rows: int, *, width: int, kept_rows: int, kept_width: int) -> None:
        """Make place for rows of `width` tokens and one more column; keep the old tokens."""
        rows, _, columns, _ = self._keys.shape
        if num_rows <= rows and width <= self._end < columns:
            return
        kept = (slice(kept_rows), slice(None), slice(self._end - kept_width, self._end))
        to = (slice(kept_rows), slice(None), slice(width - kept_width, width))
        size = (num_rows + num_rows // 4, width + width // 4 + 1)
        self._keys = _copied(self._keys, size, kept=kept, to=to)
        self._values = _copied(self._values, size, kept=kept, to=to)
        self._end = width

    def write_row(self, row: int, states: LayerStates) -> None:
        """Write a whole row. Cells before it become 0: a masked NaN would still be NaN."""
        begin = self._end - states.keys_HTD.shape[1]
        for buffer, own_HTD in ((self._keys, states[0]), (self._values, states[1])):
            buffer[row, :, :begin] = 0
            buffer[row, :, begin : self._end] = own_HTD

    def read_row(self, row: int, *, length: int) -> LayerStates:
        """Return a copy of the newest tokens of a row."""
        cells = (row, slice(None), slice(self._end - length, self._end))
        return LayerStates(self._keys[cells].clone(), self._values[cells].clone())

    def copy_row(self, row: int, *, to: int) -> None:
        """Copy all tokens of a row over another one."""
        for buffer in (self._keys, self._values):
            buffer[to, :, : self._end] = buffer[row, :, : self._end]

    def show(self, num_rows: int, *, width: int) -> None:
        """Select the rows, and the last `width` tokens of each, for the next forward pass."""
        self._rows, self._begin = num_rows, self._end - width

    def get_seq_length(self) -> int:
        """Return the number of selected columns."""
        return self._end - self._begin

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the newest column, and return all selected columns with it."""
        old, self._end = self._end, self._end + key_states.shape[2]
        self._keys[: self._rows, :, old : self._end] = key_states
        self._values[: self._rows, :, old : self._end] = value_states
        shown = (slice(self._rows), slice(None), slice(self._begin, self._end))
        return self._keys[shown], self._values[shown]


def _copied(old: Tensor, size: tuple[int, int], *, kept: Cells, to: Cells) -> Tensor:
    """Return a buffer of so many rows and columns: the kept cells of the old one, and 0."""
    made = old.new_zeros(size[0], old.shape[1], size[1], old.shape[3])
    made[to] = old[kept]
    return made
