"""Log-probabilities of a response under a policy, in memory that does not grow with the vocabulary.

Shapes: B rows, T columns, R response columns, N picked tokens, K targets of a position, H hidden
size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from turnstream.batching.merge.merging import merge_turns
from turnstream.errors import BatchingError
from turnstream.types import Turn
from turnstream.worker.layouts import PackedTensors
from turnstream.worker.losses import token_entropies, token_logprobs
from turnstream.worker.operation_losses import target_logprobs
from turnstream.worker.operation_tensors import OperationTensors
from turnstream.worker.tensors import LeftPaddedTensors
from turnstream_server.models.packed import PackedRows, packed_inputs
from turnstream_server.models.sharding import one_pass

_CHUNK_VALUES = 1 << 24
"""Logits in memory at a time, 64 MB. A row of 22,000 tokens over 8,192 has 11 times as many."""


_Score = Callable[[Tensor, Tensor], Tensor]
"""Takes logits (N, V) and tokens (N,), returns K numbers for each token, float32 (K, N)."""


class PaddedRows(NamedTuple):
    """Rows that end in the last column: int64, and set on real tokens."""

    input_ids_BT: Tensor
    attention_mask_BT: Tensor


class ScoringSlots(NamedTuple):
    """A forward pass, and the tokens that it scores, each by a slot of a row of the output.

    Attributes:
        inputs: arguments of the model.
        row_N, slot_N: int64, places of the slots in the output (B, T, ...).
        tokens: int64, the tokens, (N,) or (N, K).
    """

    inputs: dict[str, Any]
    row_N: Tensor
    slot_N: Tensor
    tokens: Tensor


def score_turns(model: PreTrainedModel, turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns with the log-probability of every trained token.

    Turns that continue each other are one row, so a conversation costs one forward pass.
    """
    scored = list(turns)
    for row in merge_turns(turns):
        ids_BT = torch.from_numpy(row.input_ids.astype(np.int64))[None].to(model.device)
        mask_BR = torch.from_numpy(row.loss_mask)[None].to(model.device)
        unpadded = PaddedRows(ids_BT, torch.ones_like(ids_BT))
        with torch.no_grad():
            logprobs_BR = response_logprobs(model, unpadded, mask_BR=mask_BR)
        logprobs = logprobs_BR[0].cpu().numpy()
        for index, (begin, end) in zip(row.turns, row.turn_spans, strict=True):
            scored[index] = dataclasses.replace(turns[index], logprobs=logprobs[begin:end])
    return scored


def response_logprobs(
    model: PreTrainedModel,
    rows: PaddedRows | LeftPaddedTensors | PackedTensors,
    *,
    mask_BR: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """Return the log-probability of each response token, 0 outside the mask: float32 (B, R).

    Logits are computed only inside the mask, in chunks, and again for the gradient. The result of
    an empty mask is differentiable too; its gradient is 0. `mask_BR` is of the last R columns. The
    first token of a row inside the mask is a BatchingError.

    The mask and the result of packed rows are of their slots, (N,): slot j scores the token in
    slot j + 1. The model is one of `models.packed.enable_packing`.
    """

    def score(logits_NV: Tensor, tokens_N: Tensor) -> Tensor:
        return token_logprobs(logits_NV, tokens=tokens_N, temperature=temperature)[None]

    return _placed_token_scores(model, rows, mask_BR=mask_BR, score=score)[0]


class ResponseScores(NamedTuple):
    """Log-probability of each response token, and entropy of the policy there: float32, in nats."""

    logprobs_BR: Tensor
    entropies_BR: Tensor


def response_scores(
    model: PreTrainedModel,
    rows: PaddedRows | LeftPaddedTensors | PackedTensors,
    *,
    mask_BR: Tensor,
    temperature: float = 1.0,
) -> ResponseScores:
    """Return `response_logprobs` and the entropies of one forward pass, 0 outside the mask."""

    def score(logits_NV: Tensor, tokens_N: Tensor) -> Tensor:
        logprobs_N = token_logprobs(logits_NV, tokens=tokens_N, temperature=temperature)
        return torch.stack([logprobs_N, token_entropies(logits_NV, temperature=temperature)])

    logprobs_BR, entropies_BR = _placed_token_scores(model, rows, mask_BR=mask_BR, score=score)
    return ResponseScores(logprobs_BR, entropies_BR)


def padded_target_logprobs(model: PreTrainedModel, part: OperationTensors) -> Tensor:
    """Return the log-probability of each target of operation rows, float32 (N, K).

    Rows have one width. Logits are computed in chunks, and again for the gradient.
    """
    row_N, slot_N = part.row_of_N, part.position_ids_N
    longest = max(end - begin for begin, end in itertools.pairwise(part.bounds))
    ids_BT = part.input_ids_N.new_zeros((len(part.row_ids), longest))
    # Attention is causal: no position sees the padding after its row.
    ids_BT = ids_BT.index_put((row_N, slot_N), part.input_ids_N)
    inputs = {"input_ids": ids_BT, "use_cache": False}
    return _target_logprobs(model, ScoringSlots(inputs, row_N, slot_N, part.target_ids_NK))


def packed_target_logprobs(model: PreTrainedModel, part: OperationTensors) -> Tensor:
    """Return `padded_target_logprobs` of a pass without padding, after `packed.enable_packing`."""
    rows = PackedRows(part.input_ids_N, part.position_ids_N, part.bounds)
    slot_N = torch.arange(len(part.input_ids_N), device=part.input_ids_N.device)
    scored = ScoringSlots(
        packed_inputs(model, rows), torch.zeros_like(slot_N), slot_N, part.target_ids_NK
    )
    return _target_logprobs(model, scored)


def _target_logprobs(model: PreTrainedModel, scored: ScoringSlots) -> Tensor:
    def score(logits_NV: Tensor, targets_NK: Tensor) -> Tensor:
        return target_logprobs(logits_NV, targets_NK=targets_NK).T

    return _token_scores(model, scored, score=score).T


def _placed_token_scores(
    model: PreTrainedModel,
    rows: PaddedRows | LeftPaddedTensors | PackedTensors,
    *,
    mask_BR: Tensor,
    score: _Score,
) -> Tensor:
    """Return what `score` returns for the tokens of the mask, 0 elsewhere: float32 (K, B, R)."""
    read = functools.partial(_token_scores, model, score=score)
    return placed_scores(model, rows, mask_BR=mask_BR, read=read)


def placed_scores(
    model: PreTrainedModel,
    rows: PaddedRows | LeftPaddedTensors | PackedTensors,
    *,
    mask_BR: Tensor,
    read: Callable[[ScoringSlots], Tensor],
) -> Tensor:
    """Return the numbers (K, N) of `read` at the tokens of the mask, 0 elsewhere: (K, B, R).

    `read` makes the forward pass. Layouts and masks are as for `response_logprobs`.
    """
    if isinstance(rows, PackedTensors):
        slots = _packed(model, rows, mask_BR)
    else:
        slots = _padded(rows, mask_BR)
    picked_KN = read(slots)
    result_BRK = picked_KN.new_zeros((*mask_BR.shape, len(picked_KN)))
    place = mask_BR.bool().nonzero(as_tuple=True)
    return result_BRK.index_put(place, picked_KN.T).movedim(-1, 0)


def _packed(model: PreTrainedModel, rows: PackedTensors, mask_N: Tensor) -> ScoringSlots:
    bounds = tuple(rows.layout.cu_seqlens.tolist())
    packed = PackedRows(rows.input_ids_N, rows.position_ids_N, bounds)
    (slot_N,) = mask_N.bool().nonzero(as_tuple=True)
    tokens_N = rows.input_ids_N.roll(-1)[slot_N]
    return ScoringSlots(packed_inputs(model, packed), torch.zeros_like(slot_N), slot_N, tokens_N)


def _padded(rows: PaddedRows | LeftPaddedTensors, mask_BR: Tensor) -> ScoringSlots:
    ids_BT, num_padding_B = _left_aligned(rows)
    row_N, column_N = mask_BR.bool().nonzero(as_tuple=True)
    first_column = ids_BT.shape[1] - mask_BR.shape[1]
    target_N = first_column + column_N - num_padding_B[row_N]
    if (target_N < 1).any():
        raise BatchingError("the first token of a row has no log-probability: a prompt is empty")
    inputs = {"input_ids": ids_BT, "use_cache": False}
    return ScoringSlots(inputs, row_N, target_N - 1, ids_BT[row_N, target_N])


def _left_aligned(rows: PaddedRows | LeftPaddedTensors) -> tuple[Tensor, Tensor]:
    """Return the rows shifted to begin in the first column, (B, T), and the shifts, (B,)."""
    width = rows.input_ids_BT.shape[1]
    num_padding_B = width - rows.attention_mask_BT.bool().sum(dim=1)
    columns_T = torch.arange(width, device=num_padding_B.device)
    source_BT = (columns_T + num_padding_B[:, None]) % width
    return rows.input_ids_BT.gather(1, source_BT), num_padding_B


def _token_scores(model: PreTrainedModel, scored: ScoringSlots, *, score: _Score) -> Tensor:
    """Return what `score` returns for each scored token, float32 (K, N)."""
    return one_pass(model, lambda: _pass_scores(model, scored, score=score))


def _pass_scores(model: PreTrainedModel, scored: ScoringSlots, *, score: _Score) -> Tensor:
    inputs, row_N, slot_N, tokens = scored
    hidden_BTH, head = hidden_and_head(model, **inputs)
    hidden_NH = hidden_BTH[row_N, slot_N]

    def score_chunk(chunk_NH: Tensor, chunk: Tensor) -> Tensor:
        return score(head(chunk_NH), chunk)

    size = chunk_rows(model)
    chunks = list(zip(hidden_NH.split(size), tokens.split(size), strict=True))
    if len(chunks) == 1 or not torch.is_grad_enabled():
        return torch.cat([score_chunk(*chunk) for chunk in chunks], dim=1)
    saved = [checkpoint(score_chunk, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.cat(saved, dim=1)


def hidden_and_head(
    model: PreTrainedModel, **inputs: Any
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the last hidden states (B, T, H), and the function from them to logits (..., V).

    If the head is more than a linear layer, these are the logits and the identity.
    """
    if not head_is_linear(model):
        return model(**inputs).logits, _identity
    hidden_BTH = model.base_model(**inputs).last_hidden_state
    return hidden_BTH, cast(Callable[[Tensor], Tensor], model.get_output_embeddings())


def chunk_rows(model: PreTrainedModel) -> int:
    """Return the number of positions whose logits are in memory at a time."""
    return max(1, _CHUNK_VALUES // model.config.get_text_config().vocab_size)


def _identity(values: Tensor) -> Tensor:
    return values


_LINEAR_HEADS: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()


def head_is_linear(model: PreTrainedModel) -> bool:
    """Return whether the logits are the output embeddings of the last hidden state, by a trial.

    Some families scale or cap them (Gemma 2, Cohere, Granite). A model that will be sharded has its
    trial before that.
    """
    known = _LINEAR_HEADS.get(model)
    if known is None:
        known = _LINEAR_HEADS[model] = _try_head(model)
    return known


@torch.no_grad()
def _try_head(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        return False
    ids_12 = torch.tensor([[0, 1]], device=model.device)
    expected = model(input_ids=ids_12, use_cache=False).logits
    hidden = model.base_model(input_ids=ids_12, use_cache=False).last_hidden_state
    return torch.allclose(head(hidden), expected, rtol=1e-3, atol=1e-4)
