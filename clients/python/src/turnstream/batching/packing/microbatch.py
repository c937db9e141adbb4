"""Forward passes for the rows of every rank under a budget, as many passes on every rank.

The cost of a pass depends on how it is computed, so the cost model is named and never guessed. With
L the length of a row, rounded up to the alignment::

    packed       sum of L over the rows: concatenated rows
    padded       number of rows * longest L: a rectangle
    quadratic    sum of a * L + b * L * L: concatenated rows, attention counted too

Rows are first packed so that every pass keeps to the budget, and only then balanced. In the other
order, equal parts exceed the budget as soon as rows do not divide evenly. No row is ever cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from turnstream.batching.packing.balance import Method as BalanceMethod
from turnstream.batching.packing.balance import balance, largest_part
from turnstream.batching.packing.bins import Bins, grow_bins, pack
from turnstream.batching.packing.bins import Method as PackingMethod
from turnstream.errors import BatchingError

CostModel = Literal["packed", "padded", "quadratic"]
PassOrder = Literal["largest_first", "small_at_both_ends", "as_packed"]

_UNITS_PER_TOKEN = 1 << 10
"""Costs are whole units, rounded up: a sum of floats would depend on the order of its terms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limit and cost model of one forward pass, and the methods that keep to them.

    Attributes:
        limit: highest cost of a pass; 0 means no limit. A row above it has a pass of its own.
        alignment: rows count as the next multiple of this, as they will be laid out.
        a, b: factors of the quadratic model. A transformer of width h has b / a = 1 / (6 * h).
        packing: method that fills passes of the packed and the quadratic model. A padded pass is
            always a run of rows from short to long.
        balancing: method that makes ranks, and then the passes of a rank, equal. With "none", a
            rank takes consecutive rows, and its passes stay as they are packed.
        order: order of the passes of a rank.
    """

    limit: float
    model: CostModel = "padded"
    alignment: int = 1
    a: float = 1.0
    b: float = 0.0
    packing: PackingMethod = "best_fit_decreasing"
    balancing: BalanceMethod = "auto"
    order: PassOrder = "largest_first"

    def cost(self, lengths: Sequence[int]) -> float:
        """Return the cost of a pass over rows of these lengths."""
        if self.model == "padded":
            return len(lengths) * max(_aligned(lengths, self), default=0)
        return sum(row_units(lengths, self)) / _UNITS_PER_TOKEN


def plan_passes(
    shares: Sequence[Sequence[int]], *, budget: Budget, multiple_of: int = 1
) -> list[Bins]:
    """Return the passes of every rank, as positions in its share; every rank has as many.

    Ranks that need fewer passes than another split theirs. A padded pass is ordered by its longest
    row. Shares are lengths in tokens, inert rows included.

    >>> plan_passes([[6, 5], [2, 2]], budget=Budget(limit=8, model="packed"))
    [[[0], [1]], [[0], [1]]]
    """
    fewest = [_fewest(share, budget) for share in shares]
    num_passes = max((len(passes) for passes in fewest), default=0)
    num_passes = -(-num_passes // multiple_of) * multiple_of
    for dp_rank, share in enumerate(shares):
        if len(share) < num_passes:
            raise BatchingError(
                f"rank {dp_rank} has {len(share)} rows for {num_passes} micro-batches: "
                "add inert rows"
            )
    level = _level_padded if budget.model == "padded" else _level_summed
    return [
        _ordered(level(passes, share, budget, num_passes=num_passes), share, budget)
        for passes, share in zip(fewest, shares, strict=True)
    ]


def _fewest(lengths: Sequence[int], budget: Budget) -> Bins:
    """Passes within the budget, about as few as there can be."""
    if not lengths:
        return []
    if budget.limit == 0:
        return [list(range(len(lengths)))]
    if budget.model == "padded":
        return _runs(_aligned(lengths, budget), limit=budget.limit)
    capacity = max(math.floor(budget.limit * _UNITS_PER_TOKEN), 1)
    costs = row_units(lengths, budget)
    return pack(costs, capacity=capacity, method=budget.packing, over_long="alone")


def _aligned(lengths: Sequence[int], budget: Budget) -> list[int]:
    return [-(-int(length) // budget.alignment) * budget.alignment for length in lengths]


def row_units(lengths: Sequence[int], budget: Budget) -> list[int]:
    """Return the costs of single rows in whole units, each at least 1.

    Their sum is the cost of a pass, except in the padded model, whose passes cost more.
    """
    a, b = budget.a * _UNITS_PER_TOKEN, budget.b * _UNITS_PER_TOKEN
    return [max(math.ceil(a * n + b * n * n), 1) for n in _aligned(lengths, budget)]


# --------------------------------------------------------------------------------------
# the padded model: runs of rows from short to long


def _runs(aligned: Sequence[int], *, limit: float) -> Bins:
    """Rows from short to long, a new pass wherever the longest would make it cost too much."""
    passes: Bins = []
    for row in sorted(range(len(aligned)), key=lambda row: aligned[row]):
        if passes and (len(passes[-1]) + 1) * aligned[row] <= limit:
            passes[-1].append(row)
        else:
            passes.append([row])
    return passes


def _level_padded(passes: Bins, lengths: Sequence[int], budget: Budget, *, num_passes: int) -> Bins:
    """Return so many passes with the least limit that allows them, never above the budget's."""
    aligned = _aligned(lengths, budget)
    if num_passes < 2 or budget.balancing == "none":
        return _split_to(passes, num_passes, lengths=aligned)
    low, high = 0, int(budget.limit) if budget.limit else len(aligned) * max(aligned)
    while low < high:
        middle = (low + high) // 2
        if len(_runs(aligned, limit=middle)) <= num_passes:
            high = middle
        else:
            low = middle + 1
    return _split_to(_runs(aligned, limit=high), num_passes, lengths=aligned)


def _split_to(passes: Bins, num_passes: int, *, lengths: Sequence[int]) -> Bins:
    """Halve the costliest pass of two rows or more until there are enough."""
    passes = list(passes)
    while len(passes) < num_passes:
        costs = [len(rows) * lengths[rows[-1]] if len(rows) > 1 else -1 for rows in passes]
        largest = costs.index(max(costs))
        rows = passes[largest]
        middle = len(rows) // 2
        passes[largest : largest + 1] = [rows[:middle], rows[middle:]]
    return passes


# --------------------------------------------------------------------------------------
# the models whose costs are added


def _level_summed(passes: Bins, lengths: Sequence[int], budget: Budget, *, num_passes: int) -> Bins:
    """Return so many passes: equal parts if they are better, otherwise the packed ones, split.

    Parts whose largest is smaller than the largest packed pass keep to the budget like these.
    """
    if num_passes < 2:
        return passes
    costs = row_units(lengths, budget)
    grown = grow_bins(passes, costs, multiple_of=1, at_least=num_passes)
    if budget.balancing == "none":
        return grown
    parts = balance(costs, num_parts=num_passes, method=budget.balancing)
    is_better = all(parts) and largest_part(parts, costs) < largest_part(grown, costs)
    return parts if is_better else grown


def _ordered(passes: Bins, lengths: Sequence[int], budget: Budget) -> Bins:
    """Rows of a pass ascending; passes in the order of the budget."""
    passes = [sorted(rows) for rows in passes]
    if budget.order == "as_packed":
        return passes
    weigh = max if budget.model == "padded" else budget.cost
    passes.sort(key=lambda rows: (-weigh([lengths[row] for row in rows]), rows[0]))
    return passes if budget.order == "largest_first" else passes[::2][::-1] + passes[1::2]
