"""Shares of a mini-batch: the rows of every rank, and their forward passes.

Everything is a pure function of the rows' lengths, the run's config and `dp_world_size`, so all
replicas cut the same way. All ranks get equally many rows and micro-batches, or their collectives
would wait for one another. Inert rows fill the gaps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.packing.balance import balance
from turnstream.batching.packing.bins import Bins
from turnstream.batching.packing.microbatch import Budget, plan_passes, row_units
from turnstream.batching.rows.assemble import concatenate_rows, take_rows
from turnstream.batching.rows.plain_rows import (
    INERT_LENGTH,
    MAX_INERT_ROWS,
    inert_row_id,
    inert_rows,
)
from turnstream.errors import BatchingError
from turnstream.types import Rows

_TOKENS = Budget(limit=0)
"""Rows cost their tokens."""


def rows_multiple(
    *, dp_world_size: int, mini_batch_rows: int = 1, passes_multiple_of: int = 1
) -> int:
    """Return the divisor of the number of rows, inert ones included: a least common multiple.

    A rank of n rows needs at most n passes. If n is a multiple of `passes_multiple_of`, so is the
    number of passes rounded up to it.

    >>> rows_multiple(dp_world_size=8, mini_batch_rows=12)
    24
    >>> rows_multiple(dp_world_size=2, passes_multiple_of=4)
    8
    """
    sizes = dp_world_size, mini_batch_rows, passes_multiple_of
    if min(sizes) < 1:
        raise BatchingError(f"sizes {sizes}: each must be at least 1")
    return math.lcm(mini_batch_rows, dp_world_size * passes_multiple_of)


def cut_ranks(
    lengths_B: NDArray[np.integer],
    *,
    dp_world_size: int,
    multiple_of: int = 1,
    budget: Budget = _TOKENS,
) -> list[list[int]]:
    """Return row positions of every rank, ascending; positions from B on stand for inert rows.

    Each rank gets the same number of rows, at least one. It gets about as much work, unless the
    budget balances by "none". Ranks come in the order of their first rows.

    >>> cut_ranks(np.array([8, 7, 6, 5, 4]), dp_world_size=2)
    [[0, 2, 5], [1, 3, 4]]
    """
    num_rows = len(lengths_B)
    if dp_world_size < 1 or multiple_of < 1:
        raise BatchingError(f"{dp_world_size=} and {multiple_of=} must be at least 1")
    multiple = math.lcm(dp_world_size, multiple_of)
    num_padded = max(-(-num_rows // multiple), 1) * multiple
    if num_padded - num_rows > MAX_INERT_ROWS:
        raise BatchingError(
            f"{num_rows} rows for dp_world_size={dp_world_size} need {num_padded - num_rows} "
            f"inert rows to be a multiple of {multiple}, at most {MAX_INERT_ROWS} are allowed"
        )
    lengths = [*np.asarray(lengths_B).tolist(), *[INERT_LENGTH] * (num_padded - num_rows)]
    costs = row_units(lengths, budget)
    parts = balance(costs, num_parts=dp_world_size, method=budget.balancing, equal_count=True)
    return sorted(map(sorted, parts))


def take_share(
    rows: Rows, positions: Sequence[int], *, step: int, mini_batch: int, pad_token_id: int
) -> Rows:
    """Return the rows at these positions, inert ones last; the same object if that is all rows."""
    real = [row for row in positions if row < len(rows)]
    padding = [row - len(rows) for row in positions if row >= len(rows)]
    if len(real) == len(rows) and not padding:
        return rows
    share = take_rows(rows, real)
    if not padding:
        return share
    row_ids = [inert_row_id(step, mini_batch, position) for position in padding]
    inert = inert_rows(row_ids, pad_token_id=pad_token_id, like=rows)
    return concatenate_rows([share, inert])


def rank_passes(
    lengths_B: NDArray[np.integer],
    ranks: Sequence[Sequence[int]],
    *,
    budget: Budget,
    multiple_of: int = 1,
) -> list[Bins]:
    """Return the forward passes of every rank, as positions in its share."""
    num_inert = sum(map(len, ranks)) - len(lengths_B)
    known = [*np.asarray(lengths_B).tolist(), *[INERT_LENGTH] * num_inert]
    shares = [[known[row] for row in rank] for rank in ranks]
    return plan_passes(shares, budget=budget, multiple_of=multiple_of)
