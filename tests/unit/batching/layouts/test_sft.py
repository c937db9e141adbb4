from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import assert_same, ids, mask, rows, spell
from turnstream.batching.layouts.packed import packed
from turnstream.batching.layouts.sft import (
    LossScale,
    SupervisedBins,
    bin_sequences,
    packed_supervised,
    scaled_weights,
    supervised_rows,
)
from turnstream.batching.layouts.slots import require_aligned
from turnstream.batching.packing.bins import pack
from turnstream.errors import BatchingError
from turnstream.types import Ragged, Rows

PAD = 0


def learn(*texts: str, weights: list[list[float]] | None = None) -> Rows:
    """Sequences from letters; a capital is a target of weight 1."""
    given_weights = weights or [mask(text).tolist() for text in texts]
    return supervised_rows(
        Ragged.from_rows([ids(text) for text in texts], np.int32),
        Ragged.from_rows(given_weights, np.float32),
    )


def weights_of(batch: Rows) -> Ragged[np.float32]:
    assert batch.token_weights is not None
    return batch.token_weights


def test_case_43_prompt_ends_before_the_first_target_which_is_no_first_token() -> None:
    # Nothing stands before a first token that could score it; the reference loses it too.
    batch = learn("abCdE", "abc", "aB", "ABC")

    assert spell(batch) == ["abCdE", "abc", "aB", "aBC"]
    assert batch.prompt_length.tolist() == [2, 3, 1, 1]
    assert [row.tolist() for row in weights_of(batch)] == [[1, 0, 1], [], [1], [1, 1]]
    assert batch.trajectory_num_tokens.tolist() == [2, 0, 1, 2]


def test_case_8_fractional_weights_are_kept_and_whole_numbers_become_float32() -> None:
    batch = supervised_rows(
        Ragged.from_rows([[1, 2, 3]], np.int32), Ragged.from_rows([[0, 0.25, 1]], np.float64)
    )
    whole = supervised_rows(
        Ragged.from_rows([[1, 2, 3]], np.int32), Ragged.from_rows([[0, 1, 2]], np.int64)
    )

    assert weights_of(batch).values.tolist() == [0.25, 1]
    assert weights_of(whole).values.tolist() == [1, 2]
    assert weights_of(whole).values.dtype == np.float32


@pytest.mark.parametrize(
    ("tokens", "weights", "message"),
    [
        ([[1, 2], [3]], [[0, 1], [0, 1]], "token_weights of sequence 1: 2 values for 1 tokens"),
        ([[1, 2]], [[0, 1], [0]], "2 rows of weights for 1 sequences"),
        ([[1], []], [[0], []], "sequence 1 has no token"),
        ([[1], [2, 3]], [[0], [0, np.nan]], "sequence 1: a weight is no finite float32"),
        ([[1], [2, 3]], [[0], [0, 1e39]], "sequence 1: a weight is no finite float32"),
    ],
)
def test_sequences_that_cannot_be_learned_are_refused(
    tokens: list[list[int]], weights: list[list[float]], message: str
) -> None:
    with pytest.raises(BatchingError, match=message):
        supervised_rows(Ragged.from_rows(tokens, np.int32), Ragged.from_rows(weights, np.float64))


@pytest.mark.parametrize(
    ("loss_scale", "expected"),
    [
        ("all_targets", [[0.0625, 0.25], [0.125, 0, 0.5], [0.0625], []]),
        ("own_targets", [[0.2, 0.8], [0.2, 0, 0.8], [0.25], []]),
        ("none", [[0.25, 1], [0.5, 0, 2], [0.25], []]),
    ],
)
def test_every_target_is_scaled_by_the_sum_that_is_asked_for(
    loss_scale: LossScale, expected: list[list[float]]
) -> None:
    # The reference truncates a sum of 2.5 to 2. A sum below 1 is not scaled up.
    weights = [[0, 0.25, 1], [0, 0.5, 0, 2], [0, 0.25], [0, 0]]
    batch = learn("aaa", "aaaa", "aa", "aa", weights=weights)

    scaled = scaled_weights(batch, loss_scale=loss_scale)

    assert [row.tolist() for row in scaled] == [pytest.approx(row, rel=1e-6) for row in expected]
    assert scaled.values.dtype == np.float32
    small = learn("aa", "aaa", weights=[[0, 0.25], [0, 0.25, 0.25]])
    assert scaled_weights(small, loss_scale=loss_scale).values.tolist() == [0.25] * 3


def test_mask_is_the_weight_without_token_weights() -> None:
    batch = rows("abCd", "aB")
    weighted = replace(batch, token_weights=Ragged.from_rows([[0.5, 9], [3]], np.float32))

    assert scaled_weights(batch, loss_scale="none").values.tolist() == [1, 0, 1]
    assert scaled_weights(weighted, loss_scale="none").values.tolist() == [0.5, 0, 3]


def lay_out(batch: Rows, bins: Any, **options: Any) -> SupervisedBins:
    return packed_supervised(batch, bins=bins, pad_token_id=PAD, **options)


def test_case_43_two_sequences_in_one_bin_aligned_for_tensor_parallel_ranks() -> None:
    # The reference leaves the last slot, which scores nothing, out of the mask.
    unaligned = lay_out(learn("aBC", "dE"), [[0, 1]])
    made = lay_out(learn("aBC", "dE"), [[0, 1]], alignment=2)

    assert unaligned.input_ids_KW.tolist() == [[97, 98, 99, 100, 101]]
    np.testing.assert_allclose(unaligned.target_weights_KW, [[1 / 3, 1 / 3, 0, 1 / 3, 0]])

    assert made.input_ids_KW.tolist() == [[97, 98, 99, PAD, 100, 101]]
    assert made.attention_mask_KW.tolist() == [[1, 1, 1, 0, 1, 1]]
    assert made.position_ids_KW.tolist() == [[0, 1, 2, 3, 0, 1]]
    np.testing.assert_allclose(made.target_weights_KW, [[1 / 3, 1 / 3, 0, 0, 1 / 3, 0]])
    assert [one.tolist() for one in made.cu_seqlens] == [[0, 4, 6]]
    assert made.sequence_lengths == ((3, 2),)


def test_case_44_bins_are_laid_out_shard_by_shard() -> None:
    # Of lengths 4 3 2 1 the reference makes rows of 4 | 2 | 3 | 1 tokens: it takes the last row of
    # a full bin to the end. Ours splits the bin where it is: [0] [1] [3] [2], of ranks 0 1 0 1.
    lengths = [4, 3, 2, 1]

    bins = bin_sequences(lengths, capacity=4, dp_world_size=2)
    made = lay_out(learn("aBCD", "aBC", "aB", "a"), bins)

    assert bins == [[0], [3], [1], [2]]
    assert made.sequence_lengths == ((4,), (1,), (3,), (2,))
    assert made.bins == ((0,), (3,), (1,), (2,))


def test_case_44_a_sequence_of_one_token_contributes_no_loss_and_none_no_row() -> None:
    made = lay_out(learn("A", "aB"), [[0], [1]], loss_scale="none")
    nothing = supervised_rows(Ragged.from_rows([], np.int32), Ragged.from_rows([], np.float32))

    assert len(nothing) == 0
    assert lay_out(nothing, []).input_ids_KW.shape == (0, 0)

    assert made.target_weights_KW.tolist() == [[0, 0], [1, 0]]


sequences = st.lists(
    st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from([0.0, 0.0, 0.25, 1.0])),
        min_size=1,
        max_size=9,
    ),
    min_size=1,
    max_size=12,
)


@given(sequences, st.integers(1, 4), st.sampled_from([1, 2, 4]))
def test_rectangle_has_the_slots_of_the_packed_layout(
    pairs: list[list[tuple[int, float]]], world: int, alignment: int
) -> None:
    batch = supervised_rows(
        Ragged.from_rows([[token for token, _ in row] for row in pairs], np.int32),
        Ragged.from_rows([[weight for _, weight in row] for row in pairs], np.float32),
    )
    lengths = batch.input_ids.lengths.tolist()
    cut: dict[str, Any] = {"capacity": 16, "alignment": alignment}
    num_packed = len(pack(lengths, **cut))
    if -(-num_packed // world) * world > len(lengths):
        with pytest.raises(BatchingError, match="cannot fill"):
            bin_sequences(lengths, dp_world_size=world, **cut)
        return

    bins = bin_sequences(lengths, dp_world_size=world, **cut)
    made = lay_out(batch, bins, alignment=alignment)

    require_aligned(batch)
    assert len(bins) % world == 0
    assert made.input_ids_KW.shape[1] <= 16
    assert sorted(row for own in bins for row in own) == list(range(len(lengths)))
    scaled = replace(batch, token_weights=scaled_weights(batch, loss_scale="all_targets"))
    for k, one in enumerate(packed(scaled, bins=bins, pad_token_id=PAD, alignment=alignment)):
        num_slots = len(one.input_ids_N)
        is_token = one.position_ids_N < np.repeat(one.length_B, np.diff(one.cu_seqlens))
        for line, expected in [
            (made.input_ids_KW[k], one.input_ids_N),
            (made.position_ids_KW[k], one.position_ids_N),
            (made.attention_mask_KW[k], is_token),
            (made.target_weights_KW[k], one.token_weights_N),
        ]:
            assert_same(line[:num_slots], expected)
            assert not line[num_slots:].any()
        assert_same(made.cu_seqlens[k], one.cu_seqlens)
        assert made.sequence_lengths[k] == tuple(one.length_B.tolist())
    assert made.bins == tuple(map(tuple, bins))


def test_weights_of_another_length_than_their_response_are_not_laid_out() -> None:
    short = replace(learn("aBC", "aB"), token_weights=Ragged.from_rows([[1.0], [1.0]], np.float32))

    with pytest.raises(BatchingError, match="token_weights of row 0: 1 values for 2 response"):
        lay_out(short, [[0, 1]])
