"""Rows that begin in the first column, for models that want the padding behind them.

Shapes: B rows, T columns (`width`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.buffers import zeros_in_one_piece
from turnstream.batching.checks import require_aligned, response_lengths
from turnstream.batching.layout import prefix_mask, require_fits
from turnstream.batching.slots import SlotLine, masked_scalars
from turnstream.types import Rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RightPadded:
    """Rows that all begin in the first column: `[prompt response PAD ..]`.

    All columns are T wide and follow the shift rule of `turnstream.batching.slots`: what belongs to
    the token in column t + 1 stands in column t, whose logits score it. The last column scores
    nothing.

    Attributes:
        input_ids_BT: int64.
        attention_mask_BT: bool, from lengths, never from ids.
        loss_mask_BT: bool, column t scores a trained token.
        logprobs_BT: float32, 0.0 outside the response; None if no row has any.
        rewards_BT: float32, token rewards.
        advantages_BT: float32, 0.0 where the loss mask is not set.
        token_weights_BT: float32, what a token counts for; None where that is 1.
        row_id_B: int64.
        prompt_length_B, response_length_B: int32, in tokens.
    """

    input_ids_BT: NDArray[np.int64]
    attention_mask_BT: NDArray[np.bool_]
    loss_mask_BT: NDArray[np.bool_]
    logprobs_BT: NDArray[np.float32] | None
    rewards_BT: NDArray[np.float32]
    advantages_BT: NDArray[np.float32]
    row_id_B: NDArray[np.int64]
    prompt_length_B: NDArray[np.int32]
    response_length_B: NDArray[np.int32]
    token_weights_BT: NDArray[np.float32] | None = None

    @property
    def position_ids_BT(self) -> NDArray[np.int64]:
        """int64 (B, T), 0 at the first token of every row; read-only."""
        columns_T: NDArray[np.int64] = np.arange(self.input_ids_BT.shape[1], dtype=np.int64)
        return np.broadcast_to(columns_T, self.input_ids_BT.shape)


def right_padded(rows: Rows, *, width: int, pad_token_id: int) -> RightPadded:
    """Place every row in the first columns of a rectangle.

    Args:
        rows: any number; empty prompts and empty responses are allowed.
        width: T, in tokens.
        pad_token_id: right of every row; never read by the loss.

    Raises:
        RowTooLongError: a row is longer than `width`. Nothing is cut.
        BatchingError: a row trains its first token, or a column has another length than its
            response.
    """
    require_aligned(rows)
    lengths_B = rows.input_ids.lengths
    require_fits(lengths_B, width)
    num_rows = len(rows)
    shape, num_slots = (num_rows, width), num_rows * width
    logprobs_shape = shape if rows.logprobs is not None else (0, 0)
    ids_BT, rewards_BT, advantages_BT, logprobs_BT, attention_BT, mask_BT = zeros_in_one_piece(
        (shape, np.int64),
        (shape, np.float32),
        (shape, np.float32),
        (logprobs_shape, np.float32),
        (shape, np.bool_),
        (shape, np.bool_),
    )
    order: NDArray[np.int64] = np.arange(num_rows, dtype=np.int64)
    line = SlotLine(rows, order=order, starts=order * width)
    prefix_mask(lengths_B, attention_BT)
    if pad_token_id:
        ids_BT[...] = pad_token_id
    line.place_ids(ids_BT.reshape(num_slots))
    line.place_responses(rows.loss_mask, mask_BT.reshape(num_slots).view(np.uint8))
    if rows.rewards.values.any():
        line.place_responses(rows.rewards, rewards_BT.reshape(num_slots))
    if rows.logprobs is not None:
        line.place_responses(rows.logprobs, logprobs_BT.reshape(num_slots))
    if rows.advantages is None:
        masked_scalars(rows.advantage[:, None], mask_BT, advantages_BT)
    else:
        line.place_responses(rows.advantages, advantages_BT.reshape(num_slots))
        masked_scalars(advantages_BT, mask_BT, advantages_BT)
    weights_N = line.token_weights(num_slots)
    return RightPadded(
        input_ids_BT=ids_BT,
        attention_mask_BT=attention_BT,
        loss_mask_BT=mask_BT,
        logprobs_BT=None if rows.logprobs is None else logprobs_BT,
        rewards_BT=rewards_BT,
        advantages_BT=advantages_BT,
        row_id_B=rows.row_id,
        prompt_length_B=rows.prompt_length,
        response_length_B=response_lengths(rows),
        token_weights_BT=None if weights_N is None else weights_N.reshape(shape),
    )
