"""Forward passes of sampling: whole prompts, and one more token of running sequences.

Shapes: B rows, T columns, P prompt tokens, H hidden size, K most likely tokens, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from turnstream.batching.packing.microbatch import Budget, plan_passes
from turnstream.errors import InvalidConfigError
from turnstream_server.models.kv_cache import PrefixStates, RowCache, prefix_states
from turnstream_server.models.logprobs import chunk_rows, hidden_and_head
from turnstream_server.models.sampling_params import TopkLogprobs

_ATTENTION: Final = {"full_attention", "sliding_attention"}
PREFILL: Final = Budget(limit=2048, model="padded")
"""Tokens of one pass over prompts, padding included. A longer prompt has a pass of its own."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt after its forward pass.

    Attributes:
        logits_V: for the token after the prompt.
        hidden_PH: last hidden states, or logits, as `hidden_and_head` returns them.
        head: the function from them to logits.
        cache: keys and values of all prompts of the pass.
        row: row of the prompt in the cache.
    """

    logits_V: Tensor
    hidden_PH: Tensor
    head: Callable[[Tensor], Tensor]
    cache: DynamicCache
    row: int

    def states(self) -> PrefixStates:
        """Return the keys and values of the prompt, in the memory of the pass."""
        return prefix_states(self.cache, row=self.row, length=self.hidden_PH.shape[0])


def prefill_passes(lengths: Sequence[int]) -> list[list[int]]:
    """Return the prompts of each forward pass, as positions; short prompts share one.

    >>> prefill_passes([10, 1500, 20])
    [[1], [0, 2]]
    """
    return plan_passes([lengths], budget=PREFILL)[0]


@torch.inference_mode()
def prefill(model: PreTrainedModel, prompts: Sequence[NDArray[np.int32]]) -> list[Prefix]:
    """Return every prompt after one forward pass: causal attention does not see padding."""
    rows = [torch.from_numpy(prompt).long() for prompt in prompts]
    ids_BT = pad_sequence(rows, batch_first=True).to(model.device)
    cache = DynamicCache()
    inputs = {"input_ids": ids_BT, "use_cache": True, _cache_keyword(model): cache}
    hidden_BTH, head = hidden_and_head(model, **inputs)
    last_B = torch.tensor([len(row) - 1 for row in rows], device=ids_BT.device)
    logits_BV = head(hidden_BTH[torch.arange(len(rows), device=ids_BT.device), last_B])
    return [
        Prefix(logits_BV[row], hidden_BTH[row, : len(ids)], head, cache, row)
        for row, ids in enumerate(rows)
    ]


@torch.inference_mode()
def decode_step(model: PreTrainedModel, cache: RowCache, token_ids: Sequence[int]) -> Tensor:
    """Return the logits (B, V) after one more token of every row; the cache has it then."""
    ids_B1 = torch.tensor(token_ids, device=model.device)[:, None]
    states, arguments = cache.next_step()
    arguments |= {_cache_keyword(model): states, "use_cache": True}
    return model(input_ids=ids_B1, **arguments).logits[:, -1]


class PromptLogprobs(NamedTuple):
    """Log-probabilities of the P tokens of a prompt, float32 (P,), and the K most likely ones."""

    logprobs: NDArray[np.float32]
    topk: TopkLogprobs | None


@torch.inference_mode()
def prompt_logprobs(
    model: PreTrainedModel,
    prefix: Prefix,
    prompt_ids: NDArray[np.int32],
    *,
    temperature: float,
    num_topk: int,
) -> PromptLogprobs:
    """Return the log-probability of every prompt token, under softmax(logits / temperature).

    The first is NaN: no token precedes it. Logits are in memory in chunks.
    """
    size = chunk_rows(model)
    hidden_PH = prefix.hidden_PH[:-1]
    targets_P = torch.from_numpy(prompt_ids[1:]).long().to(hidden_PH.device)
    logprobs: list[Tensor] = [torch.full((1,), torch.nan)]
    top_ids: list[Tensor] = [torch.zeros(1, num_topk, dtype=torch.long)]
    top_logprobs: list[Tensor] = [torch.full((1, num_topk), torch.nan)]
    for hidden_NH, targets_N in zip(hidden_PH.split(size), targets_P.split(size), strict=True):
        logprobs_NV = (prefix.head(hidden_NH).float() / temperature).log_softmax(-1)
        logprobs.append(logprobs_NV.gather(1, targets_N[:, None])[:, 0].cpu())
        values_NK, ids_NK = logprobs_NV.topk(num_topk, dim=-1)
        top_logprobs.append(values_NK.cpu())
        top_ids.append(ids_NK.cpu())
    topk = TopkLogprobs(torch.cat(top_ids).int().numpy(), torch.cat(top_logprobs).numpy())
    return PromptLogprobs(torch.cat(logprobs).numpy(), topk if num_topk else None)


def check_model(model: PreTrainedModel) -> None:
    """Raise an InvalidConfigError if sequences of this model cannot share a cache."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if unknown := kinds - _ATTENTION:
        message = f"{type(model).__name__} has layers of {', '.join(sorted(unknown))}"
        raise InvalidConfigError("model", f"{message}; {', '.join(sorted(_ATTENTION))} is sampled")
    if not {"position_ids", "attention_mask"} <= _parameters(model) or not _cache_keyword(model):
        message = "takes no position_ids, attention_mask and cache, so its rows cannot be batched"
        raise InvalidConfigError("model", f"{type(model).__name__} {message}")


def _cache_keyword(model: PreTrainedModel) -> str:
    """Return the name of the argument for the cache: newer releases of transformers rename it."""
    names = ("cache", "past_key_values")
    return next((name for name in names if name in _parameters(model)), "")


def _parameters(model: PreTrainedModel) -> frozenset[str]:
    return _parameters_of(type(model))


@functools.cache
def _parameters_of(kind: type[PreTrainedModel]) -> frozenset[str]:
    return frozenset(inspect.signature(kind.forward).parameters)
