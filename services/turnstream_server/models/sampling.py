"""Sampling of a token for many prompts at once.

Shapes: B prompts, T columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel


class SampledTokens(NamedTuple):
    """One token for each prompt, int32 (B, 1), and its log-probability in nats, float32 (B, 1)."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@torch.inference_mode()
def sample_tokens(
    model: PreTrainedModel,
    prompts: Sequence[NDArray[np.int32]],
    *,
    temperature: float = 1.0,
    generator: torch.Generator,
) -> SampledTokens:
    """Return a token for every prompt, in their order; equal generator states give equal tokens.

    The log-probabilities are of softmax(logits / temperature) over the whole vocabulary, as in
    `response_logprobs` at the same temperature. Attention is causal, so no prompt sees the padding
    after it.
    """
    rows = [torch.from_numpy(prompt).long() for prompt in prompts]
    ids_BT = pad_sequence(rows, batch_first=True).to(model.device)
    last_B = torch.tensor([len(row) - 1 for row in rows], device=model.device)
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    logits_BV = logits_BTV[torch.arange(len(rows), device=model.device), last_B]
    logprobs_BV = torch.log_softmax(logits_BV.float() / temperature, dim=-1)
    ids_B1 = torch.multinomial(logprobs_BV.exp(), 1, generator=generator)
    logprobs_B1 = logprobs_BV.gather(1, ids_B1)
    return SampledTokens(ids_B1.int().cpu().numpy(), logprobs_B1.cpu().numpy())
