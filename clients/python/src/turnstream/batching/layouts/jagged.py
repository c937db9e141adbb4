"""Rows as flat values and offsets, as they arrive: for nested tensors and kernels of one's own.

Shapes: N tokens of all rows, M response tokens of all rows, B rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.layouts.slots import (
    PlacedColumn,
    SlotLine,
    masked_scalars,
    require_aligned,
)
from turnstream.batching.merge.buffers import empty_in_one_piece
from turnstream.types import Rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Jagged:
    """Rows without padding and without shift: tokens and responses each have their own offsets.

    Token k of row b is `input_ids_N[offsets[b] + k]`; response value j of it is
    `loss_mask_M[response_offsets[b] + j]`, which belongs to token `prompt_length_B[b] + j`.

    Attributes:
        input_ids_N: int64.
        position_ids_N: int64, 0 at the first token of every row.
        offsets: int64 (B + 1,), of tokens.
        response_offsets: int64 (B + 1,), of response values.
        loss_mask_M: bool.
        logprobs_M: float32; None if no row has any. A view of what arrived, as are `rewards_M`.
        rewards_M: float32, token rewards.
        advantages_M: float32, 0.0 where the loss mask is not set.
        token_weights_M: float32, weight of each token; None where that is 1.
        extras: name to extra column.
        row_id_B: int64.
        prompt_length_B: int32, in tokens.
    """

    input_ids_N: NDArray[np.int64]
    position_ids_N: NDArray[np.int64]
    offsets: NDArray[np.int64]
    response_offsets: NDArray[np.int64]
    loss_mask_M: NDArray[np.bool_]
    logprobs_M: NDArray[np.float32] | None
    rewards_M: NDArray[np.float32]
    advantages_M: NDArray[np.float32]
    row_id_B: NDArray[np.int64]
    prompt_length_B: NDArray[np.int32]
    token_weights_M: NDArray[np.float32] | None = None
    extras: Mapping[str, PlacedColumn] = field(default_factory=dict[str, PlacedColumn])

    @property
    def scoring_tokens_M(self) -> NDArray[np.int64]:
        """int64 (M,): which token's logits score each response token; -1 where nothing does.

        Nothing scores the first token of a row with an empty prompt.
        """
        lengths_B = np.diff(self.response_offsets)
        first_B = self.offsets[:-1] + self.prompt_length_B - 1 - self.response_offsets[:-1]
        tokens_M = np.repeat(first_B, lengths_B) + np.arange(len(self.loss_mask_M), dtype=np.int64)
        tokens_M[self.response_offsets[:-1][(self.prompt_length_B == 0) & (lengths_B > 0)]] = -1
        return tokens_M


def jagged(rows: Rows) -> Jagged:
    """Return the rows as they are; only columns that change their type are copied."""
    require_aligned(rows)
    ids, mask = rows.input_ids.flat(), rows.loss_mask.flat()
    ids_N, positions_N, advantages_M = empty_in_one_piece(
        (ids.values.shape, np.int64),
        (ids.values.shape, np.int64),
        (mask.values.shape, np.float32),
    )
    np.copyto(ids_N, ids.values)
    starts_N = np.repeat(ids.offsets[:-1].astype(np.int64), ids.lengths)
    np.subtract(np.arange(len(ids_N), dtype=np.int64), starts_N, out=positions_N)
    mask_M = mask.values.view(np.bool_)
    if rows.advantages is None:
        masked_scalars(np.repeat(rows.advantage, mask.lengths), mask_M, advantages_M)
    else:
        masked_scalars(rows.advantages.flat().values, mask_M, advantages_M)
    order: NDArray[np.int64] = np.arange(len(rows), dtype=np.int64)
    line = SlotLine(rows, order=order, starts=ids.offsets[:-1].astype(np.int64))
    return Jagged(
        input_ids_N=ids_N,
        position_ids_N=positions_N,
        offsets=ids.offsets.astype(np.int64),
        response_offsets=mask.offsets.astype(np.int64),
        loss_mask_M=mask_M,
        logprobs_M=None if rows.logprobs is None else rows.logprobs.flat().values,
        rewards_M=rows.rewards.flat().values,
        advantages_M=advantages_M,
        row_id_B=rows.row_id,
        prompt_length_B=rows.prompt_length,
        token_weights_M=None if rows.token_weights is None else rows.token_weights.flat().values,
        extras=line.extras(ids.values.shape, on_responses=lambda values: values.flat().values),
    )
