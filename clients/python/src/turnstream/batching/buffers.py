"""Several arrays in one piece of memory.

Pieces of a few megabytes that are freed together go back to the system each time, and getting them
again, page by page, costs several times what filling them does. One piece stays with the allocator.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
