"""The cost of numpy itself for the same jobs, with everything else done in advance.

Neither checks a value nor computes a length or a place: one call per row and column remains, and
memory. No code that works row by row is faster. Short rows are compared with this, and not with the
copy of the bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnstream.types import Ragged, StoredTurn

Slices = tuple[list[slice], list[slice], Ragged[Any], type[Any], int]


def right_aligned(columns: Sequence[tuple[Ragged[Any], type[Any]]]) -> Callable[[], Any]:
    """Each column into a rectangle of zeros, a slice per row."""
    prepared: list[Slices] = []
    for values, dtype in columns:
        width = int(values.lengths.max())
        ends = [width * (row + 1) for row in range(len(values))]
        starts = [end - length for end, length in zip(ends, values.lengths.tolist(), strict=True)]
        prepared.append(_slices(values, dtype, starts, len(values) * width))
    return lambda: _copied(prepared)


def in_bins(
    columns: Sequence[tuple[Ragged[Any], type[Any]]], bins: Sequence[Sequence[int]]
) -> Callable[[], Any]:
    """Each column into a rectangle of zeros with a line for every bin, a slice per row."""
    lengths = columns[0][0].lengths.tolist()
    width = max(sum(lengths[row] for row in own) for own in bins)
    starts = [0] * len(lengths)
    for line, own in enumerate(bins):
        start = line * width
        for row in own:
            starts[row] = start
            start += lengths[row]
    prepared = [_slices(values, dtype, starts, len(bins) * width) for values, dtype in columns]
    return lambda: _copied(prepared)


def _slices(values: Ragged[Any], dtype: type[Any], starts: list[int], num_slots: int) -> Slices:
    bounds = values.offsets.tolist()
    sources = [slice(begin, end) for begin, end in itertools.pairwise(bounds)]
    targets = [
        slice(start, start + length)
        for start, length in zip(starts, values.lengths.tolist(), strict=True)
    ]
    return targets, sources, values, dtype, num_slots


def _copied(columns: list[Slices]) -> list[NDArray[Any]]:
    made: list[NDArray[Any]] = []
    for targets, sources, values, dtype, num_slots in columns:
        into: NDArray[Any] = np.zeros(num_slots, dtype)
        for target, source in zip(targets, sources, strict=True):
            into[target] = values.values[source]
        made.append(into)
    return made


def merged(trajectories: Sequence[Sequence[StoredTurn]]) -> Callable[[], Any]:
    """Concatenate each column of all stored turns; no row is made or placed."""
    turns: list[Any] = [turn for own in trajectories for turn in own]

    def job() -> list[Any]:
        return [
            np.concatenate([getattr(turn, name) for turn in turns])
            for name in ("token_ids", "loss_mask", "logprobs", "rewards")
        ]

    return job
