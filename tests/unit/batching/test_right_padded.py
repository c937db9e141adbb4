from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import assert_same, rows
from testkit.strategies import scored_rows
from turnstream.batching.layouts.padded import RightPadded, right_padded
from turnstream.errors import RowTooLongError
from turnstream.types import Rows

PAD = 7


def pad(batch: Rows, *, width: int | None = None) -> RightPadded:
    longest = int(batch.input_ids.lengths.max(initial=0))
    return right_padded(batch, width=longest if width is None else width, pad_token_id=PAD)


def test_case_9_row_longer_than_the_width_is_refused() -> None:
    # The reference is as wide as its longest row, and above its limit warns once; nothing is cut.
    assert pad(rows("abcD"), width=4).input_ids_BT.shape == (1, 4)
    with pytest.raises(RowTooLongError) as caught:
        pad(rows("aB", "abcdE"), width=4)
    assert caught.value.args == (1, 5, 4)


def test_a_mask_counts_its_columns_also_beyond_int16() -> None:
    batch = replace(rows("|" + "a" * 32_768, "ab|"), logprobs=None)

    padded = pad(batch)

    assert padded.attention_mask_BT.shape == (2, 32_768)
    assert np.count_nonzero(padded.attention_mask_BT, axis=1).tolist() == [32_768, 2]


def slow_right_padded(batch: Rows, *, width: int) -> RightPadded:
    """Token by token."""
    shape = len(batch), width
    ids_BT = np.full(shape, PAD, np.int64)
    attention_BT, mask_BT = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    rewards_BT, advantages_BT = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    logprobs_BT = None if batch.logprobs is None else np.zeros(shape, np.float32)
    weights_BT = None if batch.token_weights is None else np.zeros(shape, np.float32)
    for b in range(len(batch)):
        for t, token in enumerate(batch.input_ids[b].tolist()):
            ids_BT[b, t] = token
            attention_BT[b, t] = True
        for j in range(len(batch.loss_mask[b])):
            column = int(batch.prompt_length[b]) + j - 1
            if column < 0:
                continue
            mask_BT[b, column] = batch.loss_mask[b][j]
            rewards_BT[b, column] = batch.rewards[b][j]
            advantage = batch.advantage[b] if batch.advantages is None else batch.advantages[b][j]
            advantages_BT[b, column] = advantage if batch.loss_mask[b][j] else 0
            if logprobs_BT is not None:
                assert batch.logprobs is not None
                logprobs_BT[b, column] = batch.logprobs[b][j]
            if weights_BT is not None:
                assert batch.token_weights is not None
                weights_BT[b, column] = batch.token_weights[b][j]
    return RightPadded(
        input_ids_BT=ids_BT,
        attention_mask_BT=attention_BT,
        loss_mask_BT=mask_BT,
        logprobs_BT=logprobs_BT,
        rewards_BT=rewards_BT,
        advantages_BT=advantages_BT,
        row_id_B=batch.row_id,
        prompt_length_B=batch.prompt_length,
        response_length_B=batch.loss_mask.lengths,
        token_weights_BT=weights_BT,
    )


@given(scored_rows(), st.integers(0, 3))
def test_agrees_with_placing_token_by_token(batch: Rows, more: int) -> None:
    width = int(batch.input_ids.lengths.max(initial=0)) + more

    assert_same(pad(batch, width=width), slow_right_padded(batch, width=width))
