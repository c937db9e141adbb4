"""Rows into bins of a token capacity. A bin is a list of row indices, in order of concatenation.

For lengths 6 3 5 7 2 4 1 8 and capacity 10, as row indices::

    next_fit                    [0 1] [2] [3 4] [5 6] [7]
    first_fit                   [0 1 6] [2 4] [3] [5] [7]
    first_fit_decreasing        [7 4] [3 1] [0 5] [2 6]
    best_fit_decreasing         [7 4] [3 1] [0 5] [2 6]
    worst_fit_decreasing        [7 6] [3 4] [0 1] [2 5]

Equal lengths are ordered by index, so any process makes the same plan. No row is ever cut: a row
above the capacity is refused, or has a bin of its own if the caller allows it.

Sources: Johnson, "Near-optimal bin packing algorithms" (1973); Johnson and Garey, "A 71/60 theorem
for bin packing" (1985) for the modified first fit decreasing.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Sequence
from typing import Literal

from turnstream.errors import BatchingError, RowTooLongError

Bins = list[list[int]]
Method = Literal[
    "next_fit",
    "first_fit",
    "first_fit_decreasing",
    "best_fit_decreasing",
    "worst_fit_decreasing",
    "modified_first_fit_decreasing",
]
OverLong = Literal["refuse", "alone"]


def pack(
    lengths: Sequence[int],
    *,
    capacity: int,
    method: Method = "best_fit_decreasing",
    over_long: OverLong = "refuse",
    alignment: int = 1,
) -> Bins:
    """Return bins that hold every row once, none above the capacity but rows "alone" in one.

    Every row counts as the next multiple of `alignment`, as it will be laid out.
    """
    if capacity < 1 or alignment < 1:
        raise BatchingError(f"capacity={capacity} and alignment={alignment} must be at least 1")
    sizes = [-(-int(length) // alignment) * alignment for length in lengths]
    fitting: list[int] = []
    alone: Bins = []
    for row, size in enumerate(sizes):
        if size < 1:
            raise BatchingError(f"row {row} has {lengths[row]} tokens; packing needs at least 1")
        if size <= capacity:
            fitting.append(row)
        elif over_long == "refuse":
            raise RowTooLongError(row, size, capacity)
        else:
            alone.append([row])
    return _METHODS[method](fitting, sizes, capacity) + alone


def grow_bins(bins: Bins, lengths: Sequence[int], *, multiple_of: int, at_least: int = 0) -> Bins:
    """Split bins until their number is a multiple, never merging, so no bin grows.

    Again and again the bin with the most tokens among those of two rows or more is halved: its
    rows, longest first, go to the lighter half.

    >>> grow_bins([[0, 1, 2], [3]], [4, 3, 2, 4], multiple_of=3)
    [[0], [1, 2], [3]]
    """
    if multiple_of < 1:
        raise BatchingError(f"multiple_of={multiple_of} must be at least 1")
    target = max(len(bins), at_least, 1)
    target = -(-target // multiple_of) * multiple_of
    num_rows = sum(len(rows) for rows in bins)
    if num_rows < target:
        raise BatchingError(f"{num_rows} rows cannot fill {target} bins")
    grown = [list(rows) for rows in bins]
    loads = [_tokens(rows, lengths) for rows in grown]
    while len(grown) < target:
        splittable = [index for index, rows in enumerate(grown) if len(rows) > 1]
        heaviest = max(splittable, key=lambda index: (loads[index], -index))
        halves = _halve(grown[heaviest], lengths)
        grown[heaviest : heaviest + 1] = halves
        loads[heaviest : heaviest + 1] = [_tokens(half, lengths) for half in halves]
    return grown


def _tokens(rows: Sequence[int], lengths: Sequence[int]) -> int:
    return sum([lengths[row] for row in rows])


def _halve(rows: Sequence[int], lengths: Sequence[int]) -> Bins:
    halves: Bins = [[], []]
    totals = [0, 0]
    for row in _longest_first(rows, lengths):
        lighter = int(totals[1] < totals[0])
        halves[lighter].append(row)
        totals[lighter] += lengths[row]
    return halves


def _longest_first(rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
    lower_first = sorted(rows)  # and equal ones keep their order
    return sorted(lower_first, key=lengths.__getitem__, reverse=True)


# --------------------------------------------------------------------------------------
# the methods: rows that all fit, their sizes, the capacity


def _next_fit(rows: Sequence[int], sizes: Sequence[int], capacity: int) -> Bins:
    bins: Bins = []
    space = -1
    for row in rows:
        if sizes[row] > space:
            bins.append([])
            space = capacity
        bins[-1].append(row)
        space -= sizes[row]
    return bins


def _first_fit(rows: Sequence[int], sizes: Sequence[int], capacity: int) -> Bins:
    """Walk a tree of the most space below each node: the first fitting bin in log(bins) steps."""
    num_leaves = 1 << max(len(rows) - 1, 0).bit_length()
    most_space = [capacity] * (2 * num_leaves)
    bins: Bins = []
    for row in rows:
        size, node = sizes[row], 1
        while node < num_leaves:
            node *= 2
            node += most_space[node] < size
        index = node - num_leaves
        if index == len(bins):
            bins.append([])
        bins[index].append(row)
        most_space[node] -= size
        while node > 1:
            node //= 2
            most_space[node] = max(most_space[2 * node], most_space[2 * node + 1])
    return bins


def _first_fit_decreasing(rows: Sequence[int], sizes: Sequence[int], capacity: int) -> Bins:
    return _first_fit(_longest_first(rows, sizes), sizes, capacity)


def _best_fit_decreasing(rows: Sequence[int], sizes: Sequence[int], capacity: int) -> Bins:
    """Keep (space, bin) sorted: the least space that still fits is one bisection away."""
    bins: Bins = []
    spaces: list[tuple[int, int]] = []
    for row in _longest_first(rows, sizes):
        size = sizes[row]
        at = bisect.bisect_left(spaces, (size, -1))
        if at == len(spaces):
            bins.append([row])
            bisect.insort(spaces, (capacity - size, len(bins) - 1))
        else:
            space, index = spaces.pop(at)
            bins[index].append(row)
            bisect.insort(spaces, (space - size, index))
    return bins


def _worst_fit_decreasing(rows: Sequence[int], sizes: Sequence[int], capacity: int) -> Bins:
    """The emptiest bin, or a new one: the most even bins, and more of them than best fit needs."""
    bins: Bins = []
    emptiest: list[tuple[int, int]] = []  # (-space, bin)
    for row in _longest_first(rows, sizes):
        size = sizes[row]
        if emptiest and -emptiest[0][0] >= size:
            space, index = emptiest[0]
            bins[index].append(row)
            heapq.heapreplace(emptiest, (space + size, index))
        else:
            bins.append([row])
            heapq.heappush(emptiest, (size - capacity, len(bins) - 1))
    return bins


def _modified_first_fit_decreasing(
    rows: Sequence[int], sizes: Sequence[int], capacity: int
) -> Bins:
    ordered = _longest_first(rows, sizes)
    bins: Bins = [[row] for row in ordered if 2 * sizes[row] > capacity]
    spaces = [capacity - sizes[rows_[0]] for rows_ in bins]
    rest = _Rest([row for row in ordered if 2 * sizes[row] <= capacity], sizes)

    def put(row: int, index: int) -> None:
        rest.remove(row)
        bins[index].append(row)
        spaces[index] -= sizes[row]

    medium, small = capacity // 3, capacity // 6
    for index in range(len(bins)):  # the largest medium row beside each large one
        row = rest.largest(at_most=spaces[index])
        if row is not None and sizes[row] > medium:
            put(row, index)
    for index in reversed(range(len(bins))):  # two small rows where no medium one went
        if len(bins[index]) == 1:
            pair = rest.two_smallest(above=small, up_to=medium)
            if pair and sum(sizes[row] for row in pair) <= spaces[index]:
                put(pair[0], index)
                row = rest.largest(at_most=min(spaces[index], medium))
                assert row is not None
                put(row, index)
    for index in range(len(bins)):  # the largest row that fits, until none does
        while (row := rest.largest(at_most=spaces[index])) is not None:
            put(row, index)
    return bins + _first_fit_decreasing(rest.rows, sizes, capacity)


class _Rest:
    """Rows not placed yet, longest first, found by size."""

    def __init__(self, rows: list[int], sizes: Sequence[int]) -> None:
        self.rows = rows
        self._keys = [(-sizes[row], row) for row in rows]
        self._sizes = sizes

    def largest(self, *, at_most: int) -> int | None:
        at = bisect.bisect_left(self._keys, (-at_most, -1))
        return self.rows[at] if at < len(self.rows) else None

    def two_smallest(self, *, above: int, up_to: int) -> tuple[int, int] | None:
        end = bisect.bisect_left(self._keys, (-above, -1))
        start = bisect.bisect_left(self._keys, (-up_to, -1))
        return (self.rows[end - 1], self.rows[end - 2]) if end - start >= 2 else None

    def remove(self, row: int) -> None:
        at = bisect.bisect_left(self._keys, (-self._sizes[row], row))
        del self.rows[at], self._keys[at]


_METHODS: dict[Method, Callable[[Sequence[int], Sequence[int], int], Bins]] = {
    "next_fit": _next_fit,
    "first_fit": _first_fit,
    "first_fit_decreasing": _first_fit_decreasing,
    "best_fit_decreasing": _best_fit_decreasing,
    "worst_fit_decreasing": _worst_fit_decreasing,
    "modified_first_fit_decreasing": _modified_first_fit_decreasing,
}
