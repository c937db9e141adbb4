from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given

from testkit import assert_same, rows
from testkit.strategies import scored_rows
from turnstream.batching.layouts.jagged import Jagged, jagged
from turnstream.batching.merge.buffers import flat
from turnstream.types import Ragged, Rows


def test_array_of_the_right_type_is_not_copied() -> None:
    batch = rows("abC", "aB")
    assert batch.logprobs is not None

    made = jagged(batch)

    assert made.logprobs_M is not None
    assert np.shares_memory(made.logprobs_M, batch.logprobs.values)
    assert np.shares_memory(made.loss_mask_M, batch.loss_mask.values)


def test_a_slice_of_a_larger_column_gets_offsets_from_0() -> None:
    whole = Ragged.from_rows([[1], [2, 3], [4]], np.int32)

    part = flat(Ragged(whole.values, whole.offsets[1:]))

    assert (part.values.tolist(), part.offsets.tolist()) == ([2, 3, 4], [0, 2, 3])


def test_rows_that_are_slices_are_laid_out_alone() -> None:
    batch = rows("xY", "abC")
    second = {
        name: Ragged(column.values, column.offsets[1:])
        for name in ("input_ids", "loss_mask", "logprobs", "rewards")
        if isinstance(column := getattr(batch, name), Ragged)
    }
    rest = {name: getattr(batch, name)[1:] for name in ("row_id", "prompt_length", "advantage")}

    made = jagged(replace(batch, **second, **rest))

    assert (made.input_ids_N.tolist(), made.offsets.tolist()) == ([97, 98, 99], [0, 3])


def slow_jagged(batch: Rows) -> Jagged:
    """Token by token."""
    advantages = [
        (batch.advantage[b] if batch.advantages is None else batch.advantages[b][j])
        if trained
        else np.float32(0)
        for b in range(len(batch))
        for j, trained in enumerate(batch.loss_mask[b].tolist())
    ]
    positions = [t for b in range(len(batch)) for t in range(len(batch.input_ids[b]))]
    return Jagged(
        input_ids_N=np.array([t for row in batch.input_ids for t in row.tolist()], np.int64),
        position_ids_N=np.array(positions, np.int64),
        offsets=batch.input_ids.offsets.astype(np.int64),
        response_offsets=batch.loss_mask.offsets.astype(np.int64),
        loss_mask_M=batch.loss_mask.values.astype(np.bool_),
        logprobs_M=None if batch.logprobs is None else batch.logprobs.values,
        rewards_M=batch.rewards.values,
        advantages_M=np.array(advantages, np.float32),
        row_id_B=batch.row_id,
        prompt_length_B=batch.prompt_length,
        token_weights_M=None if batch.token_weights is None else batch.token_weights.values,
    )


@given(scored_rows())
def test_agrees_with_placing_token_by_token(batch: Rows) -> None:
    found = jagged(batch)

    assert_same(found, slow_jagged(batch))
    starts = zip(
        batch.input_ids.offsets, batch.prompt_length, batch.loss_mask.lengths, strict=False
    )
    scoring = [
        start + prompt + j - 1 if prompt + j else -1
        for start, prompt, num_response in starts
        for j in range(num_response)
    ]
    assert found.scoring_tokens_M.tolist() == scoring
