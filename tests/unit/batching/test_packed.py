from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import assert_same, rows
from testkit.strategies import scored_rows
from turnstream.batching.layouts.jagged import jagged
from turnstream.batching.layouts.packed import Packed, line_up, packed, sequence_alignment
from turnstream.batching.layouts.padded import left_padded, right_padded
from turnstream.batching.packing.bins import pack
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


def test_row_that_trains_its_first_token_is_refused() -> None:
    # It would be scored by the last token of another row.
    with pytest.raises(BatchingError, match="row 1 trains its first token"):
        pack_all(rows("aB", "AB"))


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


@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=20),
    st.integers(40, 90),
    st.sampled_from([1, 2, 8]),
)
def test_no_bin_has_more_slots_than_the_capacity_it_was_packed_for(
    lengths: list[int], capacity: int, alignment: int
) -> None:
    batch = rows(*["a" * (length - 1) + "B" for length in lengths])

    bins = pack(lengths, capacity=capacity, alignment=alignment, over_long="alone")
    made = packed(batch, bins=bins, pad_token_id=0, alignment=alignment)

    assert all(len(one.input_ids_N) <= capacity for one in made)
    assert sorted(row for one in made for row in one.row_id_B.tolist()) == list(range(len(lengths)))
    assert sum(int(one.length_B.sum()) for one in made) == sum(lengths)
    assert sum(int(one.loss_mask_N.sum()) for one in made) == len(lengths)


def test_more_slots_than_int32_counts_are_refused() -> None:
    batch = rows("aB", "aB")
    offsets = np.array([0, 2**30, 2**31 - 1], np.int32)  # their tokens are not read
    wide = replace(batch, input_ids=Ragged(batch.input_ids.values, offsets))

    with pytest.raises(BatchingError, match="slots in one bin: cu_seqlens are int32"):
        line_up(wide, bins=[[0, 1, 0]], alignment=1)
    order, _, starts = line_up(wide, bins=[[0], [1]], alignment=1)

    assert (order.tolist(), starts.tolist()) == ([0, 1], [0, 2**30, 2**31 - 1])


@given(scored_rows())
def test_trained_slots_are_inside_their_row_in_every_layout(batch: Rows) -> None:
    width = int(batch.input_ids.lengths.max(initial=0))
    response_width = int(batch.loss_mask.lengths.max(initial=0))
    num_trained = int(batch.loss_mask.values.sum())

    left = left_padded(batch, width=width, response_width=response_width, pad_token_id=PAD)
    right = right_padded(batch, width=width, pad_token_id=PAD)
    line = pack_all(batch, alignment=4)
    flat = jagged(batch)

    assert not (left.loss_mask_BR & ~left.response_mask_BR).any()
    assert not (left.response_mask_BR & ~left.attention_mask_BT[:, width - response_width :]).any()
    # What a slot scores is the next one: it must be a real token of the same row.
    scored_BT = right.loss_mask_BT[:, :-1]
    assert not (scored_BT & ~right.attention_mask_BT[:, 1:]).any()
    assert not right.loss_mask_BT[:, -1:].any()
    for row, (start, stop) in enumerate(itertools.pairwise(line.cu_seqlens.tolist())):
        assert not line.loss_mask_N[max(start + line.length_B[row] - 1, start) : stop].any()
    rows_M = np.repeat(np.arange(len(batch)), batch.loss_mask.lengths)
    trained = flat.scoring_tokens_M[flat.loss_mask_M]
    row_of_token = np.searchsorted(flat.offsets, trained, side="right") - 1
    assert (trained >= 0).all()
    assert row_of_token.tolist() == rows_M[flat.loss_mask_M].tolist()
    for mask in (left.loss_mask_BR, right.loss_mask_BT, line.loss_mask_N, flat.loss_mask_M):
        assert int(mask.sum()) == num_trained
