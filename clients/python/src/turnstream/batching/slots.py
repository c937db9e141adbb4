"""Rows on a line of slots: what right-padded, packed and supervised layouts have in common.

Row b takes the slots from `starts_B[b]` on, a token in each. The layouts differ in where the rows
start, and in how the line is cut.

**The shift rule.** The logits of a slot score the token of the next slot, so what belongs to a
response token (mask, log-probability, reward, advantage) stands one slot before it, in the slot
that scores it::

    tokens      p p a b | q c       two rows, with the responses "a b" and "c"
    loss_mask   0 1 1 0   1 0

The last slot of a row scores nothing. The first token of a row is scored by nothing, so a row that
trains it is refused; such a token is never lost silently.

Shapes: N slots, B rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnstream.types import Ragged, Rows


class SlotLine:
    """Writes columns of rows into the slots that are theirs. What is between is left alone.

    Args:
        rows: their prompt lengths and masks say what is scored where.
        order: positions in `rows`, one per row of the line; rows may be left out.
        starts: first slot of each, in the same order.
    """

    def __init__(self, rows: Rows, *, order: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        prompts = rows.prompt_length[order]
        self._rows = rows
        self._order = order
        self._starts = starts
        self._is_unscored = (prompts == 0) & (rows.input_ids.lengths[order] > 0)
        self._first_slots = (starts + np.maximum(prompts - 1, 0)).tolist()

    def place_ids(self, into_N: NDArray[np.int64]) -> None:
        """Tokens, each in its own slot."""
        ids = self._rows.input_ids
        begins, ends = ids.offsets[self._order], ids.offsets[self._order + 1]
        place_rows(ids.values, begins.tolist(), ends.tolist(), self._starts.tolist(), into_N)

    def clear_padding(self, into_N: NDArray[np.bool_], *, lengths: NDArray[np.integer]) -> None:
        """Clear the slots that stand behind the tokens of rows which take `lengths` slots."""
        token_lengths = self._rows.input_ids.lengths[self._order]
        for row in np.flatnonzero(token_lengths < lengths).tolist():
            into_N[self._starts[row] + token_lengths[row] : self._starts[row] + lengths[row]] = (
                False
            )

    def place_positions(self, into_N: NDArray[np.int64], *, lengths: NDArray[np.integer]) -> None:
        """0, 1, 2 ... from the first slot of every row, `lengths` of them."""
        counting: NDArray[np.int64] = np.arange(lengths.max(initial=0), dtype=np.int64)
        begins = [0] * len(lengths)
        place_rows(counting, begins, lengths.tolist(), self._starts.tolist(), into_N)

    def place_responses(self, values: Ragged[Any], into_N: NDArray[Any]) -> None:
        """Values of response tokens, each in the slot that scores its token."""
        begins = values.offsets[self._order] + self._is_unscored
        ends = values.offsets[self._order + 1]
        place_rows(values.values, begins.tolist(), ends.tolist(), self._first_slots, into_N)

    def token_weights(self, num_slots: int) -> NDArray[np.float32] | None:
        """float32 (N,), what the token that a slot scores counts for; None where that is 1."""
        weights = self._rows.token_weights
        if weights is None:
            return None
        placed_N: NDArray[np.float32] = np.zeros(num_slots, np.float32)
        self.place_responses(weights, placed_N)
        return placed_N


def masked_scalars(
    scalars: NDArray[np.float32], mask: NDArray[np.bool_], into: NDArray[np.float32]
) -> None:
    """Write the scalar where the mask is set and 0.0 elsewhere; all three shapes broadcast.

    Products of bits and not of numbers: -1.0 * 0 would be -0.0, and nan * 0 would stay.
    """
    np.multiply(mask.view(np.uint8), scalars.view(np.uint32), out=into.view(np.uint32))


def place_rows(
    values: NDArray[Any],
    begins: list[int],
    ends: list[int],
    slots: list[int],
    into_N: NDArray[Any],
) -> None:
    """Copy `values[begin:end]` to the slots from `slot` on, for every row."""
    source: Any = values
    target: Any = into_N
    if values.ndim == 1 and values.dtype == into_N.dtype and values.dtype.kind in "biuf":
        # Without a change of type, slices of memory take half the time that slices of arrays do.
        source, target = values.data, into_N.data
    for begin, end, slot in zip(begins, ends, slots, strict=True):
        target[slot : slot + end - begin] = source[begin:end]
