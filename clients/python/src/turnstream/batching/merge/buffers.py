"""Several arrays in one piece of memory, which the allocator keeps.

Pieces of a few megabytes that are freed together return to the system. Fetching them again costs
several times as much as filling them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from turnstream.errors import BatchingError
from turnstream.types import Ragged

Scalar = TypeVar("Scalar", bound=np.generic)
Shaped = tuple[tuple[int, ...], type[Any]]

_CACHE_LINE = 64


def zeros_in_one_piece(*arrays: Shaped) -> list[NDArray[Any]]:
    """Arrays of these shapes and types, filled with 0; each begins at a cache line."""
    return _carved(np.zeros, arrays)


def empty_in_one_piece(*arrays: Shaped) -> list[NDArray[Any]]:
    """Arrays of these shapes and types, not filled; each begins at a cache line."""
    return _carved(np.empty, arrays)


def _carved(
    allocate: Callable[[int, type[np.uint8]], NDArray[np.uint8]], arrays: tuple[Shaped, ...]
) -> list[NDArray[Any]]:
    sizes = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in arrays]
    aligned = [-(-size // _CACHE_LINE) * _CACHE_LINE for size in sizes]
    memory = allocate(sum(aligned), np.uint8)
    starts = itertools.accumulate(aligned, initial=0)
    return [
        np.ndarray(shape, dtype, memory, start)
        for (shape, dtype), start in zip(arrays, starts, strict=False)
    ]


def offsets_of(lengths: ArrayLike) -> NDArray[np.int32]:
    """Return int32 (B + 1,): the offsets of rows of these lengths, (B,)."""
    bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if bounds[-1] > np.iinfo(np.int32).max:
        raise BatchingError(f"{bounds[-1]} values in one mini-batch: offsets are int32")
    return bounds.astype(np.int32)


def row_sums(column: Ragged[Any], dtype: type[Scalar]) -> NDArray[Scalar]:
    """Return the sum of every row, (B,), in this type."""
    offsets = column.offsets
    sums_B: NDArray[Scalar] = np.zeros(len(column), dtype)
    filled_B = offsets[:-1] < offsets[1:]  # an empty segment would give `reduceat` a neighbour
    if filled_B.any():
        values = column.values[: offsets[-1]]
        sums_B[filled_B] = np.add.reduceat(values, offsets[:-1][filled_B], dtype=dtype)
    return sums_B
