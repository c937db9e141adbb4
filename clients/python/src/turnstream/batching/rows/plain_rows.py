"""Rows without a trajectory: given by a caller and trained as they are, or inert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnstream.errors import BatchingError
from turnstream.types import Extent, OperationColumns, Ragged, Rows
from turnstream.types.extras import num_values

INERT_LENGTH = 2
INERT_RESPONSE_LENGTH = 1
"""Tokens of an inert row: one of prompt, one of response, so that no layout has an empty side."""

_POSITION_BITS = 20
_MINI_BATCH_BITS = 12

MAX_INERT_ROWS = 1 << _POSITION_BITS
"""Bound for one mini-batch: the id of an inert row contains its position."""


def plain_rows(
    input_ids: Ragged[np.int32],
    loss_mask: Ragged[np.uint8],
    *,
    num_trained_B: NDArray[np.int64],
    first_row_id: int,
) -> Rows:
    """Rows of weight 1 without a name, a reward, an advantage or a version.

    Each counts as the whole of its trajectory and of its group. `loss_mask` covers the responses,
    and the tokens before them are prompt. `num_trained_B` (B,) counts tokens with mask 1.
    """
    num_rows = len(input_ids)
    zeros, no_names = np.zeros(num_rows, np.int32), [""] * num_rows
    no_runs = np.zeros(num_rows + 1, np.int32)
    return Rows(
        row_id=np.arange(first_row_id, first_row_id + num_rows, dtype=np.int64),
        trajectory_id=no_names,
        group_id=no_names,
        prompt_uid=no_names,
        status=no_names,
        sample=zeros,
        attempt=zeros,
        sequence_index=zeros,
        is_last=np.ones(num_rows, np.bool_),
        is_padding=np.zeros(num_rows, np.bool_),
        weight=np.ones(num_rows, np.float32),
        reward=np.full(num_rows, np.nan, np.float32),
        advantage=np.zeros(num_rows, np.float32),
        prompt_length=input_ids.lengths - loss_mask.lengths,
        trajectory_num_tokens=num_trained_B,
        group_num_tokens=num_trained_B,
        input_ids=input_ids,
        loss_mask=loss_mask,
        logprobs=None,
        rewards=Ragged(np.zeros(len(loss_mask.values), np.float32), loss_mask.offsets),
        run_versions=Ragged(np.empty(0, np.int64), no_runs),
        run_counts=Ragged(np.empty(0, np.int32), no_runs),
    )


def inert_row_id(step: int, mini_batch: int, position: int) -> int:
    """Return a negative id that no other row of the run has.

    >>> inert_row_id(1, 0, 0), inert_row_id(1, 0, 1)
    (-4294967297, -4294967298)
    """
    fits = 0 <= position < 1 << _POSITION_BITS and 0 <= mini_batch < 1 << _MINI_BATCH_BITS
    if not fits or not 0 <= step < 1 << 31:
        raise BatchingError(
            f"inert row {position} of mini-batch {mini_batch} of step {step}: no id is left"
        )
    return -1 - ((((step << _MINI_BATCH_BITS) | mini_batch) << _POSITION_BITS) | position)


def inert_rows(row_ids: list[int], *, pad_token_id: int, like: Rows) -> Rows:
    """Return rows that count nowhere: two tokens, mask 0, no reward, weight 0.

    Each is a group of its own, named by its row id. They have the columns of the rows `like`, with
    zeros, and with neither items nor captured router choices.
    """
    num_rows = len(row_ids)
    ones = np.arange(num_rows + 1, dtype=np.int32)
    ids = np.full(num_rows * INERT_LENGTH, pad_token_id, np.int32)
    rows = plain_rows(
        Ragged(ids, ones * np.int32(INERT_LENGTH)),
        Ragged(np.zeros(num_rows, np.uint8), ones),
        num_trained_B=np.zeros(num_rows, np.int64),
        first_row_id=0,
    )
    names = [f"inert{row_id}" for row_id in row_ids]
    optional = {name: getattr(like, name) for name in ("logprobs", "advantages", "token_weights")}
    return replace(
        rows,
        row_id=np.array(row_ids, np.int64),
        trajectory_id=[f"{name}/0/0" for name in names],
        group_id=names,
        prompt_uid=names,
        is_last=np.zeros(num_rows, np.bool_),
        is_padding=np.ones(num_rows, np.bool_),
        weight=np.zeros(num_rows, np.float32),
        run_versions=Ragged(np.full(num_rows, -1, np.int64), ones),
        run_counts=Ragged(np.ones(num_rows, np.int32), ones),
        **{
            name: None if column is None else _zeros(column, "response_token", num_rows)
            for name, column in optional.items()
        },
        operations=like.operations and _no_operations(like.operations, num_rows),
        extras={
            name: replace(column, values=_zeros(column.values, column.per, num_rows))
            for name, column in like.extras.items()
        },
    )


def _zeros(like: Ragged[Any], per: Extent, num_rows: int) -> Ragged[Any]:
    count = num_values(per, num_tokens=INERT_LENGTH, num_response=INERT_RESPONSE_LENGTH) or 0
    values = np.zeros((num_rows * count, *like.values.shape[1:]), like.values.dtype)
    return Ragged(values, np.arange(num_rows + 1, dtype=np.int32) * np.int32(count))


def _no_operations(like: OperationColumns, num_rows: int) -> OperationColumns:
    mask = like.ratio_mask
    return OperationColumns(
        request_id=[""] * num_rows,
        datum_index=np.zeros(num_rows, np.int32),
        target_ids=_zeros(like.target_ids, "token", num_rows),
        target_weights=_zeros(like.target_weights, "token", num_rows),
        ratio_mask=None if mask is None else _zeros(mask, "token", num_rows),
    )
