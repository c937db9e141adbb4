from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import testkit
from testkit.shares import budgeted_passes, rank_share
from turnstream.batching.config.values import Aggregation
from turnstream.batching.layouts.outputs import ResponseValues, join_by_row_id
from turnstream.batching.layouts.sft import bin_sequences, packed_supervised, supervised_rows
from turnstream.batching.packing.microbatch import Budget
from turnstream.batching.rows.assemble import take_rows
from turnstream.errors import BatchingError
from turnstream.types import MiniBatch, Ragged, Rows
from turnstream.worker.layouts import jagged_to_torch, packed_to_torch, right_padded_to_torch
from turnstream.worker.losses import (
    aggregate,
    next_token_logprobs,
    response_logprobs,
    token_logprobs,
)
from turnstream.worker.tensors import RowTensors, to_torch

VOCAB_SIZE = 128

Result = tuple[Tensor, list[ResponseValues]]
"""The loss of a share, and the log-probabilities of its responses."""

Score = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(ids, positions, may_attend) -> logits; the mask is (..., T, T), set where a token is seen."""


def score_by_token(ids: Tensor, positions: Tensor, may_attend: Tensor) -> Tensor:
    """Logits that depend on the token alone."""
    generator = torch.Generator().manual_seed(0)
    table_VV = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator)
    return table_VV[ids]


def score_by_position(ids: Tensor, positions: Tensor, may_attend: Tensor) -> Tensor:
    """Logits that depend on the token and its position."""
    return score_by_token(ids, positions, may_attend) * (1 + positions[..., None])


def causal(attended_BT: Tensor) -> Tensor:
    """(B, T, T): every token sees the real ones up to itself, and itself."""
    width = attended_BT.shape[1]
    seen_TT = torch.ones(width, width, dtype=torch.bool).tril()
    return (seen_TT & attended_BT[:, None, :]) | torch.eye(width, dtype=torch.bool)


def token_loss(current: Tensor, advantages: Tensor | float) -> Tensor:
    return -advantages * current + current**2 / 8


def loss_of(current: Tensor, part: RowTensors, advantages: Tensor, *, mode: Any) -> Tensor:
    loss = token_loss(current, advantages)
    return aggregate(loss, part, mode=mode, denominators=part.denominators)


def left_loss(share: MiniBatch, score: Score, *, mode: Any) -> Result:
    # One column more than the longest row, so that something stands before a whole response.
    wide = replace(share, info=replace(share.info, width=share.info.width + 1))
    total, values = torch.zeros(()), list[ResponseValues]()
    for part in to_torch(wide).micro_batches():
        pad = torch.zeros(len(part.input_ids_BT), 1, dtype=torch.int64)
        ids_BT = torch.cat([pad, part.input_ids_BT], dim=1)
        attended_BT = torch.cat([pad.bool(), part.attention_mask_BT], dim=1)
        positions_BT = torch.cat([pad, part.position_ids_BT], dim=1)
        logits_BTV = score(ids_BT, positions_BT, causal(attended_BT))
        current_BR = response_logprobs(
            logits_BTV, input_ids_BT=ids_BT, response_width=part.response_width
        )
        total = total + loss_of(current_BR, part, part.advantages_BR, mode=mode)
        values.append(part.response_values(current_BR))
    return total, values


def right_loss(share: MiniBatch, score: Score, *, mode: Any) -> Result:
    total, values = torch.zeros(()), list[ResponseValues]()
    for part in right_padded_to_torch(share).micro_batches():
        positions_BT = torch.arange(part.input_ids_BT.shape[1]).expand_as(part.input_ids_BT)
        logits_BTV = score(part.input_ids_BT, positions_BT, causal(part.attention_mask_BT))
        current_BT = next_token_logprobs(logits_BTV, input_ids=part.input_ids_BT)
        total = total + loss_of(current_BT, part, part.advantages_BT, mode=mode)
        values.append(part.response_values(current_BT))
    return total, values


def packed_loss(share: MiniBatch, score: Score, *, mode: Any, alignment: int = 1) -> Result:
    total, values = torch.zeros(()), list[ResponseValues]()
    for part in packed_to_torch(share, alignment=alignment):
        rows_N = part.row_of
        seen_NN = (rows_N[:, None] == rows_N) & torch.ones(len(rows_N), len(rows_N)).tril().bool()
        logits_NV = score(part.input_ids_N, part.position_ids_N, seen_NN)
        current_N = next_token_logprobs(logits_NV, input_ids=part.input_ids_N)
        total = total + loss_of(current_N, part, part.advantages_N, mode=mode)
        values.append(part.response_values(current_N))
    return total, values


def jagged_loss(share: MiniBatch, score: Score, *, mode: Any) -> Result:
    part = jagged_to_torch(share)
    rows_N = torch.arange(len(part.row_id_B)).repeat_interleave(part.offsets.diff())
    seen_NN = (rows_N[:, None] == rows_N) & torch.ones(len(rows_N), len(rows_N)).tril().bool()
    logits_NV = score(part.input_ids_N, part.position_ids_N, seen_NN)
    current_M = token_logprobs(logits_NV[part.scoring_tokens_M], tokens=part.response_ids_M)
    total = loss_of(current_M, part, part.advantages_M, mode=mode)
    return total, [part.response_values(current_M)]


def packed_by_8(share: MiniBatch, score: Score, *, mode: Any) -> Result:
    return packed_loss(share, score, mode=mode, alignment=8)


LAYOUTS = [left_loss, right_loss, packed_loss, packed_by_8, jagged_loss]

texts = st.lists(
    st.from_regex(r"[a-d]{1,4}\|[a-dA-D]{0,5}", fullmatch=True), min_size=1, max_size=6
)


def cut(
    batch: Rows, *, world: int, limit: int, order: Sequence[int] | None = None
) -> list[MiniBatch]:
    """The shares of a mini-batch whose rows have advantages, in this order, by token budget."""
    rng = np.random.default_rng(0)
    batch = replace(batch, advantage=rng.standard_normal(len(batch)).astype(np.float32))
    batch = take_rows(batch, range(len(batch)) if order is None else order)
    whole = testkit.mini_batch_info(batch)
    denominators = whole.denominators._replace(length_constant=7)
    budget = Budget(limit=limit, model="packed")
    made: list[MiniBatch] = []
    for rank in range(world):
        own: Any = {"dp_rank": rank, "dp_world_size": world}
        share = rank_share(batch, step=1, mini_batch=0, pad_token_id=0, **own)
        passes = budgeted_passes(batch, budget=budget, **own)
        num_inert = int(share.is_padding.sum())
        info = testkit.mini_batch_info(
            share,
            denominators=denominators,
            micro_batches=passes,
            num_real_rows=len(share) - num_inert,
            num_inert_rows=num_inert,
            **own,
        )
        made.append(MiniBatch(rows=share, info=info))
    return made


@pytest.mark.parametrize("score", [score_by_token, score_by_position])
@given(
    mode=st.sampled_from(get_args(Aggregation)),
    responses=texts,
    world=st.integers(1, 3),
    limit=st.integers(0, 20),
    data=st.data(),
)
@settings(max_examples=2 * settings().max_examples)
def test_loss_is_independent_of_layout_ranks_micro_batches_and_order(
    score: Score, mode: str, responses: list[str], world: int, limit: int, data: st.DataObject
) -> None:
    batch = testkit.rows(*responses, group_ids=[f"g{i % 2}" for i in range(len(responses))])
    weights = [data.draw(st.sampled_from([0.25, 0.5, 0.75, 1.0])) for _ in responses]
    batch = replace(batch, weight=np.array(weights, np.float32))
    [whole] = cut(batch, world=1, limit=0)
    order = data.draw(st.permutations(range(len(batch))))
    shares = cut(batch, world=world, limit=limit, order=order)

    expected, values = left_loss(whole, score, mode=mode)
    layout = data.draw(st.sampled_from(LAYOUTS))
    parts = [layout(share, score, mode=mode) for share in shares]

    assert sum(loss.item() for loss, _ in parts) == pytest.approx(expected.item(), abs=1e-4)
    found = join_by_row_id([own for _, of_rank in parts for own in of_rank], batch)
    want = join_by_row_id(values, batch)
    assert found.offsets.tolist() == want.offsets.tolist()
    np.testing.assert_allclose(found.values, want.values, atol=1e-4)


@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(1, 99), st.sampled_from([0.0, 0.5, 1.0])), min_size=2, max_size=7
        ),
        min_size=2,
        max_size=6,
    )
)
def test_supervised_rows_have_the_same_loss_in_all_layouts(
    pairs: list[list[tuple[int, float]]],
) -> None:
    rows = supervised_rows(
        Ragged.from_rows([[token for token, _ in row] for row in pairs], np.int32),
        Ragged.from_rows([[weight for _, weight in row] for row in pairs], np.float32),
    )
    scale = 1 / max(sum(weight for row in pairs for _, weight in row[1:]), 1)
    mini_batch = MiniBatch(rows=rows, info=testkit.mini_batch_info(rows))
    bins = packed_supervised(
        rows,
        bins=bin_sequences(rows.input_ids.lengths.tolist(), capacity=16, dp_world_size=2),
        pad_token_id=0,
    )
    ids_KW = torch.from_numpy(bins.input_ids_KW)
    scored_KW = next_token_logprobs(score_by_token(ids_KW, ids_KW, ids_KW), input_ids=ids_KW)
    in_bins = float((torch.from_numpy(bins.target_weights_KW) * token_loss(scored_KW, 1.0)).sum())

    losses = [
        layout(mini_batch, score_by_token, mode="seq_mean_token_sum")[0] for layout in LAYOUTS
    ]

    scale *= mini_batch.denominators.weight_sum
    in_layouts = [float(loss) * scale for loss in losses]
    assert in_layouts == pytest.approx([in_bins] * len(LAYOUTS), rel=1e-4, abs=1e-6)


def test_response_values_exclude_inert_rows() -> None:
    batch = testkit.rows("abC", "aBC", "a|b", is_padding=[False, False, True])
    mini_batch = MiniBatch(rows=batch, info=testkit.mini_batch_info(batch))

    [one] = packed_to_torch(mini_batch)

    values = one.response_values(torch.arange(8, dtype=torch.bfloat16, requires_grad=True))
    assert {row_id: own.tolist() for row_id, own in values.items()} == {0: [1], 1: [3, 4]}


def test_pulled_mini_batch_converts_to_every_layout() -> None:
    from turnstream.worker import PulledMiniBatch

    batch = testkit.rows("abC", "aBC")
    info = testkit.mini_batch_info(batch, alignment=8)
    pulled = PulledMiniBatch(rows=batch, info=info, content_hash="", num_bytes=0)

    assert pulled.to_torch_right_padded().input_ids_BT.shape == (2, 3)
    assert [len(part.input_ids_N) for part in pulled.to_torch_packed()] == [16]
    assert [len(part.input_ids_N) for part in pulled.to_torch_packed(alignment=4)] == [8]
    assert pulled.to_torch_jagged().offsets.tolist() == [0, 3, 6]


def every_layout(mini_batch: MiniBatch, *, device: str | None = None) -> list[Any]:
    return [
        to_torch(mini_batch, device=device),
        right_padded_to_torch(mini_batch, device=device),
        *packed_to_torch(mini_batch, device=device),
        jagged_to_torch(mini_batch, device=device),
    ]


def test_require_logprobs_names_the_rows_without_in_every_layout() -> None:
    batch = testkit.rows("aB", "aCd")
    missing = Ragged.from_rows([[-0.5], [np.nan, 0]], np.float32)
    mini_batch = MiniBatch(
        rows=replace(batch, logprobs=missing), info=testkit.mini_batch_info(batch)
    )

    for tensors in every_layout(mini_batch):
        with pytest.raises(BatchingError, match=r"rows without log-probabilities: 1$"):
            tensors.require_logprobs()


def test_device_holds_every_tensor_in_every_layout() -> None:
    batch = testkit.rows("abC", "aBC")
    mini_batch = MiniBatch(rows=batch, info=testkit.mini_batch_info(batch))

    for tensors in every_layout(mini_batch, device="meta"):
        values = [getattr(tensors, name) for name in tensors.__dataclass_fields__]
        assert {v.device.type for v in values if isinstance(v, Tensor)} == {"meta"}
