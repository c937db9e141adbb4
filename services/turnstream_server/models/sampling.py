"""Sampling of many responses at once, with the log-probability of every sampled token.

Shapes: B rows, T columns, R response columns, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel


class SampledResponse(NamedTuple):
    """One response.

    Attributes:
        token_ids: int32 (R,), the stop token included; at least one.
        logprobs: float32 (R,) in nats, under the sampling distribution.
        is_stopped: whether a stop token ended it, and not the limit.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    is_stopped: bool


@torch.inference_mode()
def sample_batch(
    model: PreTrainedModel,
    prompts: Sequence[NDArray[np.int32]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    temperature: float = 1.0,
    generator: torch.Generator,
) -> list[SampledResponse]:
    """Return a response to every prompt, in order of the prompts. All are sampled together.

    The log-probabilities are of softmax(logits / temperature) over the whole vocabulary, as in
    `response_logprobs` at the same temperature.

    Args:
        model: in evaluation mode.
        prompts: int32 (P,) each, of any lengths from 1.
        max_new_tokens: limit of a response.
        stop_ids: tokens that end a response, and belong to it.
        temperature: above 0.
        generator: on the device of the model; equal states have equal responses.
    """
    if not prompts:
        return []
    ids_BT, attention_BT = _left_padded(prompts, device=model.device)
    stop_S = torch.tensor(sorted(stop_ids), dtype=torch.long, device=model.device)
    is_stopped_B = torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
    length_B = torch.zeros(len(prompts), dtype=torch.long, device=model.device)
    columns: list[tuple[Tensor, Tensor]] = []
    cache = None
    while len(columns) < max_new_tokens and not bool(is_stopped_B.all()):
        output = _forward(model, ids_BT, attention_BT, cache=cache)
        cache = output.past_key_values
        logprobs_BV = torch.log_softmax(output.logits[:, -1].float() / temperature, dim=-1)
        ids_BT = torch.multinomial(logprobs_BV.exp(), 1, generator=generator)
        columns.append((ids_BT, logprobs_BV.gather(1, ids_BT)))
        length_B += ~is_stopped_B
        is_stopped_B = is_stopped_B | torch.isin(ids_BT[:, 0], stop_S)
        if attention_BT is not None:
            attention_BT = torch.cat([attention_BT, torch.ones_like(ids_BT)], dim=1)
    tokens_BR, logprobs_BR = (torch.cat(each, dim=1).cpu() for each in zip(*columns, strict=True))
    responses = zip(
        tokens_BR.int().numpy(),
        logprobs_BR.numpy(),
        length_B.tolist(),
        is_stopped_B.tolist(),
        strict=True,
    )
    return [
        SampledResponse(tokens[:length], logprobs[:length], is_stopped)
        for tokens, logprobs, length, is_stopped in responses
    ]


def _forward(model: PreTrainedModel, ids_BT: Tensor, attention_BT: Tensor | None, *, cache: object):
    """Run the columns that are not in the cache, with logits of the last one."""
    # transformers 5.24 renamed the argument, and calls the old name deprecated
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cached = {name: cache, "use_cache": True, "logits_to_keep": 1}
    if attention_BT is None:
        return model(input_ids=ids_BT, **cached)
    positions_BT = (attention_BT.cumsum(dim=1) - 1).clamp(min=0)
    return model(
        input_ids=ids_BT,
        attention_mask=attention_BT,
        position_ids=positions_BT[:, -ids_BT.shape[1] :],
        **cached,
    )


def _left_padded(
    prompts: Sequence[NDArray[np.int32]], *, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return the prompts, int64 (B, T), and the mask of real tokens; None for equal lengths."""
    width = max(map(len, prompts))
    ids_BT = np.zeros((len(prompts), width), np.int64)
    attention_BT = np.zeros((len(prompts), width), np.int64)
    for row, prompt in enumerate(prompts):
        ids_BT[row, width - len(prompt) :] = prompt
        attention_BT[row, width - len(prompt) :] = 1
    is_ragged = not attention_BT.all()
    attention = torch.from_numpy(attention_BT).to(device) if is_ragged else None
    return torch.from_numpy(ids_BT).to(device), attention
