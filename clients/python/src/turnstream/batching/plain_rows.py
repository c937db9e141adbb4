"""Rows that no trajectory stands behind: given by a caller, trained as they are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from turnstream.types import Ragged, Rows


def plain_rows(
    input_ids: Ragged[np.int32],
    loss_mask: Ragged[np.uint8],
    *,
    num_trained_B: NDArray[np.int64],
    first_row_id: int,
) -> Rows:
    """Rows of weight 1 without a name, a reward, an advantage or a version.

    Each counts as the whole of its trajectory and of its group.

    Args:
        input_ids: of B rows.
        loss_mask: of their responses; what is before them is prompt.
        num_trained_B: (B,), tokens with mask 1.
        first_row_id: of the first row; they count up.
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
