from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import assert_same, rows
from testkit.strategies import scored_rows
from turnstream.batching.layouts.packed import Packed, line_up, packed, sequence_alignment
from turnstream.errors import BatchingError
from turnstream.types import Ragged, Rows

PAD = 7


def pack_all(batch: Rows, *, alignment: int = 1) -> Packed:
    bins = [list(range(len(batch)))]
    [only] = packed(batch, bins=bins, pad_token_id=PAD, alignment=alignment)
    return only


def test_bins_of_nothing_are_empty() -> None:
    assert packed(rows("aB"), bins=[], pad_token_id=0) == []
    [empty] = packed(rows("aB"), bins=[[]], pad_token_id=0)
    assert (empty.cu_seqlens.tolist(), empty.max_length) == ([0], 0)


def test_an_alignment_below_one_is_refused() -> None:
    with pytest.raises(BatchingError, match="alignment=0 must be at least 1"):
        pack_all(rows("aB"), alignment=0)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"tensor_parallel": 1}, 1),
        ({"tensor_parallel": 4}, 4),
        ({"tensor_parallel": 2, "context_parallel": 2}, 8),
        ({"context_parallel": 2}, 4),
        ({"tensor_parallel": 2, "context_parallel": 2, "multiple_of": 32}, 32),
        ({"tensor_parallel": 3, "multiple_of": 16}, 48),
    ],
)
def test_the_alignment_is_what_parallel_ranks_cut_a_row_into(
    sizes: dict[str, int], expected: int
) -> None:
    assert sequence_alignment(**sizes) == expected


def slow_packed(batch: Rows, rows_of_bin: list[int], *, alignment: int) -> Packed:
    """Token by token."""
    ids: list[int] = []
    positions: list[int] = []
    mask: list[bool] = []
    rewards: list[float] = []
    advantages: list[float] = []
    logprobs: list[float] = []
    weights: list[float] = []
    bounds = [0]
    for b in rows_of_bin:
        tokens = batch.input_ids[b].tolist()
        for t in range(-(-len(tokens) // alignment) * alignment):
            j = t + 1 - int(batch.prompt_length[b])
            scores = 0 <= j < len(batch.loss_mask[b])
            trains = scores and bool(batch.loss_mask[b][j])
            ids.append(tokens[t] if t < len(tokens) else PAD)
            positions.append(t)
            mask.append(trains)
            rewards.append(batch.rewards[b][j] if scores else 0)
            advantage = batch.advantage[b]
            if trains and batch.advantages is not None:
                advantage = batch.advantages[b][j]
            advantages.append(advantage if trains else 0)
            if batch.token_weights is not None:
                weights.append(batch.token_weights[b][j] if scores else 0)
            if batch.logprobs is not None:
                logprobs.append(batch.logprobs[b][j] if scores else 0)
        bounds.append(len(ids))
    return Packed(
        input_ids_N=np.array(ids, np.int64),
        position_ids_N=np.array(positions, np.int64),
        cu_seqlens=np.array(bounds, np.int32),
        length_B=batch.input_ids.lengths[rows_of_bin],
        loss_mask_N=np.array(mask, np.bool_),
        logprobs_N=None if batch.logprobs is None else np.array(logprobs, np.float32),
        rewards_N=np.array(rewards, np.float32),
        advantages_N=np.array(advantages, np.float32),
        row_id_B=batch.row_id[rows_of_bin],
        prompt_length_B=batch.prompt_length[rows_of_bin],
        response_length_B=batch.loss_mask.lengths[rows_of_bin],
        token_weights_N=None if batch.token_weights is None else np.array(weights, np.float32),
    )


@given(st.data(), scored_rows(), st.sampled_from([1, 2, 3, 4]))
def test_agrees_with_placing_token_by_token(
    data: st.DataObject, batch: Rows, alignment: int
) -> None:
    order = data.draw(st.permutations(range(len(batch))))
    cut = data.draw(st.integers(0, len(batch)))
    bins = [list(order[:cut]), list(order[cut:])]

    found = packed(batch, bins=bins, pad_token_id=PAD, alignment=alignment)

    expected = [slow_packed(batch, own, alignment=alignment) for own in bins]
    assert_same(found, expected)


def test_more_slots_than_int32_counts_are_refused() -> None:
    batch = rows("aB", "aB")
    offsets = np.array([0, 2**30, 2**31 - 1], np.int32)  # their tokens are not read
    wide = replace(batch, input_ids=Ragged(batch.input_ids.values, offsets))

    with pytest.raises(BatchingError, match="slots in one bin: cu_seqlens are int32"):
        line_up(wide, bins=[[0, 1, 0]], alignment=1)
    order, _, starts = line_up(wide, bins=[[0], [1]], alignment=1)

    assert (order.tolist(), starts.tolist()) == ([0, 1], [0, 2**30, 2**31 - 1])
