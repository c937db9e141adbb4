"""Which rank computes which rows of a mini-batch, and in which forward passes.

Everything is a pure function of the rows' lengths and of `dp_world_size`, so any replica cuts the
same way, and every rank knows what the others do. All ranks get equally many rows and equally many
micro-batches, or their collectives would wait for one another: what is missing is filled with
inert rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.assemble import concatenate_rows, take_rows
from turnstream.batching.balance import balance
from turnstream.batching.merged_extras import inert_columns
from turnstream.batching.microbatch import Budget, plan_passes, row_units
from turnstream.batching.packing import Bins
from turnstream.errors import BatchingError
from turnstream.types import ExtraColumn, Ragged, Rows

INERT_LENGTH = 2
INERT_RESPONSE_LENGTH = 1
"""Tokens of an inert row: one of prompt, one of response, so that no layout has an empty side."""

_TOKENS = Budget(limit=0)
"""Rows cost their tokens."""

_POSITION_BITS = 20
_MINI_BATCH_BITS = 12

MAX_INERT_ROWS = 1 << _POSITION_BITS
"""Bound for one mini-batch: the id of an inert row contains its position."""


def rows_multiple(
    *,
    dp_world_size: int,
    critic_dp_world_size: int | None = None,
    mini_batch_rows: int | None = None,
    critic_mini_batch_rows: int | None = None,
    passes_multiple_of: int = 1,
) -> int:
    """What the number of rows has to be a multiple of: the least common multiple of all of these.

    The largest of them would not do: 12 rows do not divide over 8 ranks. A rank of n rows needs at
    most n passes; if n is one of `passes_multiple_of`, so is what their number is rounded up to.

    >>> rows_multiple(dp_world_size=8, critic_dp_world_size=12)
    24
    >>> rows_multiple(dp_world_size=2, passes_multiple_of=4)
    8

    Args:
        dp_world_size: ranks of the policy.
        critic_dp_world_size: ranks of the critic; None where there is no critic.
        mini_batch_rows: rows of one update, where that is fixed.
        critic_mini_batch_rows: the same of the critic.
        passes_multiple_of: the passes of every rank are a multiple of this.

    Raises:
        BatchingError: one is below 1.
    """
    sizes = (dp_world_size, critic_dp_world_size, mini_batch_rows, critic_mini_batch_rows)
    declared = [size for size in sizes if size is not None]
    if min(*declared, passes_multiple_of) < 1:
        raise BatchingError(f"sizes {sizes}, {passes_multiple_of}: each must be at least 1")
    return math.lcm(*declared, dp_world_size * passes_multiple_of)


def cut_ranks(
    lengths_B: NDArray[np.integer],
    *,
    dp_world_size: int,
    multiple_of: int = 1,
    budget: Budget = _TOKENS,
) -> list[list[int]]:
    """Row positions of every rank, ascending; positions from B on stand for inert rows.

    Each rank gets the same number of rows, at least one, and about as much work: the better of
    both methods of `turnstream.batching.balance`. Ranks come in the order of their first rows.

    >>> cut_ranks(np.array([8, 7, 6, 5, 4]), dp_world_size=2)
    [[0, 2, 5], [1, 3, 4]]

    Args:
        lengths_B: tokens of every row.
        dp_world_size: number of ranks.
        multiple_of: what else divides the number of rows, inert ones included: `rows_multiple`.
        budget: says what a row costs: its tokens, or more where attention counts too.

    Raises:
        BatchingError: one of both is below 1, or more inert rows are needed than have ids.
    """
    num_rows = len(lengths_B)
    _require_at_least_1(dp_world_size=dp_world_size, multiple_of=multiple_of)
    multiple = math.lcm(dp_world_size, multiple_of)
    num_padded = max(-(-num_rows // multiple), 1) * multiple
    if num_padded - num_rows > MAX_INERT_ROWS:
        raise BatchingError(
            f"{num_rows} rows for dp_world_size={dp_world_size} need {num_padded - num_rows} "
            f"inert rows to be a multiple of {multiple}, at most {MAX_INERT_ROWS} are allowed"
        )
    lengths = [*np.asarray(lengths_B).tolist(), *[INERT_LENGTH] * (num_padded - num_rows)]
    costs = row_units(lengths, budget)
    return sorted(map(sorted, balance(costs, num_parts=dp_world_size, equal_count=True)))


def take_share(
    rows: Rows, positions: Sequence[int], *, step: int, mini_batch: int, pad_token_id: int
) -> Rows:
    """Return the rows at these positions, inert ones last; the same object if that is all rows.

    Args:
        rows: the whole mini-batch.
        positions: row positions of one rank, as `cut_ranks` returns them.
        step: of the batch; part of the ids of inert rows, as is `mini_batch`.
        mini_batch: index in the batch.
        pad_token_id: both tokens of an inert row.

    Raises:
        BatchingError: a number is too large for the ids of inert rows.
    """
    real = [row for row in positions if row < len(rows)]
    padding = [row - len(rows) for row in positions if row >= len(rows)]
    if len(real) == len(rows) and not padding:
        return rows
    share = take_rows(rows, real)
    if not padding:
        return share
    row_ids = [inert_row_id(step, mini_batch, position) for position in padding]
    has_logprobs = rows.logprobs is not None
    inert = inert_rows(
        row_ids, pad_token_id=pad_token_id, has_logprobs=has_logprobs, extras=rows.extras
    )
    return concatenate_rows([share, inert])


def inert_row_id(step: int, mini_batch: int, position: int) -> int:
    """A negative id that no other row of the run has.

    >>> inert_row_id(1, 0, 0), inert_row_id(1, 0, 1)
    (-4294967297, -4294967298)

    Raises:
        BatchingError: a number does not fit.
    """
    fits = 0 <= position < 1 << _POSITION_BITS and 0 <= mini_batch < 1 << _MINI_BATCH_BITS
    if not fits or not 0 <= step < 1 << 31:
        raise BatchingError(
            f"inert row {position} of mini-batch {mini_batch} of step {step}: no id is left"
        )
    return -1 - ((((step << _MINI_BATCH_BITS) | mini_batch) << _POSITION_BITS) | position)


def inert_rows(
    row_ids: list[int],
    *,
    pad_token_id: int,
    has_logprobs: bool,
    extras: Mapping[str, ExtraColumn] = MappingProxyType({}),
) -> Rows:
    """Rows that are computed and count nowhere: two tokens, mask 0, no reward, weight 0.

    They copy nothing of a real row, and each is a group of its own, with names as fresh as its row
    id. A logprob column is there if the other rows have one. Of every
    extra column they have zeros; of items none, and of router choices none that was captured, so
    that layouts write the dummy choice.

    Args:
        row_ids: as given by `inert_row_id`.
        pad_token_id: both tokens.
        has_logprobs: whether the other rows have them.
        extras: of the other rows; their types and shapes count.
    """
    num_rows = len(row_ids)

    def filled(value: float, dtype: type[np.generic]) -> NDArray[np.generic]:
        return np.full(num_rows, value, dtype)

    def ragged(value: float, dtype: type[np.generic], length: int = 1) -> Ragged[np.generic]:
        offsets = np.arange(num_rows + 1, dtype=np.int32) * np.int32(length)
        return Ragged(np.full(num_rows * length, value, dtype), offsets)

    names = [f"inert{row_id}" for row_id in row_ids]
    numbers = {name: filled(value, dtype) for name, (value, dtype) in _INERT_VALUES.items()}
    columns = {
        **numbers,
        "trajectory_id": [f"{name}/0/0" for name in names],
        "group_id": names,
        "prompt_uid": names,
        "status": [""] * num_rows,
        "row_id": np.array(row_ids, np.int64),
        "input_ids": ragged(pad_token_id, np.int32, INERT_LENGTH),
        "loss_mask": ragged(0, np.uint8),
        "logprobs": ragged(0.0, np.float32) if has_logprobs else None,
        "rewards": ragged(0.0, np.float32),
        "run_versions": ragged(-1, np.int64),
        "run_counts": ragged(1, np.int32),
        "extras": inert_columns(extras, [INERT_LENGTH] * num_rows, [1] * num_rows),
    }
    return Rows(**columns)  # type: ignore[reportArgumentType] -- the tables below give the dtypes


_INERT_VALUES: dict[str, tuple[float, type[np.generic]]] = {
    "sample": (0, np.int32),
    "attempt": (0, np.int32),
    "sequence_index": (0, np.int32),
    "is_last": (False, np.bool_),
    "is_padding": (True, np.bool_),
    "weight": (0.0, np.float32),
    "reward": (float("nan"), np.float32),
    "advantage": (0.0, np.float32),
    "prompt_length": (1, np.int32),
    "trajectory_num_tokens": (0, np.int64),
    "group_num_tokens": (0, np.int64),
}


def rank_passes(
    lengths_B: NDArray[np.integer],
    ranks: Sequence[Sequence[int]],
    *,
    budget: Budget,
    multiple_of: int = 1,
) -> list[Bins]:
    """Return the forward passes of every rank, as positions in its share.

    Args:
        lengths_B: tokens of every row of the mini-batch.
        ranks: row positions of every rank, as `cut_ranks` returns them.
        budget: of one pass; as given to `cut_ranks`.
        multiple_of: the number of passes is one of these.

    Raises:
        RowTooLongError: a row exceeds the limit and the budget refuses such rows.
        BatchingError: a rank has fewer rows than passes are needed.
    """
    num_inert = sum(map(len, ranks)) - len(lengths_B)
    known = [*np.asarray(lengths_B).tolist(), *[INERT_LENGTH] * num_inert]
    shares = [[known[row] for row in rank] for rank in ranks]
    return plan_passes(shares, budget=budget, multiple_of=multiple_of)


def _require_at_least_1(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise BatchingError(f"{name}={size} must be at least 1")
