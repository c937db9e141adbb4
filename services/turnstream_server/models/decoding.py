"""Forward passes of sampling: whole prompts, and one more token of running sequences.

Rows join and quit the buffers of keys and values at any step.

Shapes: B rows, T columns or cached tokens, P prompt tokens, H hidden size or heads, C columns of
the buffers, D size of a head, K most likely tokens, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from turnstream.batching.packing.microbatch import Budget, plan_passes
from turnstream.errors import InvalidConfigError
from turnstream_server.models.logprobs import chunk_rows, hidden_and_head
from turnstream_server.models.sampling_params import TopkLogprobs


class LayerStates(NamedTuple):
    """Keys and values of one sequence in one layer: (H, T, D)."""

    keys_HTD: Tensor
    values_HTD: Tensor


Cells = tuple[slice, slice, slice]

PrefixStates = list[LayerStates]
"""Keys and values of one sequence, for every layer."""


def prefix_states(cache: DynamicCache, *, row: int, length: int) -> PrefixStates:
    """Return the first `length` tokens of a row of a cache, in its memory."""
    states: PrefixStates = []
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer)
        assert layer.keys is not None
        assert layer.values is not None
        states.append(LayerStates(layer.keys[row, :, :length], layer.values[row, :, :length]))
    return states


class RowCache:
    """The cache of all running sequences.

    Rows are right-aligned: the newest token of every row is in the same column. So the distance of
    two columns is the distance of their positions, as attention with a sliding window needs it.
    A decode step writes one column in place. Buffers are a quarter larger than needed, so that few
    steps copy them. `lengths` are the cached tokens of every row.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self._layers: list[_RightAlignedLayer] = []

    def append(self, states: PrefixStates) -> None:
        """Add a row after the last one."""
        if not self.lengths:
            self._layers = [_RightAlignedLayer(own) for own in states]
        row, width = len(self.lengths), self._width()
        self.lengths.append(states[0].keys_HTD.shape[1])
        for layer, own in zip(self._layers, states, strict=True):
            layer.reserve(row + 1, width=self._width(), kept_rows=row, kept_width=width)
            layer.write_row(row, own)

    def remove(self, row: int) -> None:
        """Remove a row; the last row takes its place. The buffers of no rows are freed."""
        last = len(self.lengths) - 1
        for layer in self._layers:
            layer.copy_row(last, to=row)
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        if not self.lengths:
            self._layers = []

    def states(self, row: int) -> PrefixStates:
        """Return a copy of the keys and values of a row."""
        return [layer.read_row(row, length=self.lengths[row]) for layer in self._layers]

    def next_step(self) -> tuple[Cache, dict[str, Tensor]]:
        """Return the cache for one more token per row, and the arguments of the forward pass.

        The arguments are int64: `position_ids` (B, 1) and `attention_mask` (B, C). The forward
        pass itself adds the token to the cache.
        """
        width, rows = self._width(), len(self.lengths)
        for layer in self._layers:
            layer.reserve(rows, width=width, kept_rows=rows, kept_width=width)
            layer.show(rows, width=width)
        lengths_B1 = torch.tensor(self.lengths, device=self._layers[0].device)[:, None]
        columns_C = torch.arange(width + 1, device=lengths_B1.device)
        mask_BC = (columns_C >= width - lengths_B1).long()
        self.lengths = [length + 1 for length in self.lengths]
        layers: list[Any] = list(self._layers)
        return Cache(layers=layers), {"position_ids": lengths_B1, "attention_mask": mask_BC}

    def _width(self) -> int:
        return max(self.lengths, default=0)


class _RightAlignedLayer(DynamicLayer):
    """Buffers (B, H, C, D) of one layer. The newest tokens end before column `_end`."""

    def __init__(self, like: LayerStates) -> None:
        super().__init__()
        self.device, self.dtype = like.keys_HTD.device, like.keys_HTD.dtype
        self._keys, self._values = (each[None, :, :0].repeat(0, 1, 1, 1) for each in like)
        self._rows = self._begin = self._end = 0

    def reserve(self, num_rows: int, *, width: int, kept_rows: int, kept_width: int) -> None:
        """Make place for rows of `width` tokens and one more column; keep the old tokens."""
        rows, _, columns, _ = self._keys.shape
        if num_rows <= rows and width <= self._end < columns:
            return
        kept = (slice(kept_rows), slice(None), slice(self._end - kept_width, self._end))
        to = (slice(kept_rows), slice(None), slice(width - kept_width, width))
        size = (num_rows + num_rows // 4, width + width // 4 + 1)
        self._keys = _copied(self._keys, size, kept=kept, to=to)
        self._values = _copied(self._values, size, kept=kept, to=to)
        self._end = width

    def write_row(self, row: int, states: LayerStates) -> None:
        """Write a whole row. Cells before it become 0: a masked NaN would still be NaN."""
        begin = self._end - states.keys_HTD.shape[1]
        for buffer, own_HTD in ((self._keys, states[0]), (self._values, states[1])):
            buffer[row, :, :begin] = 0
            buffer[row, :, begin : self._end] = own_HTD

    def read_row(self, row: int, *, length: int) -> LayerStates:
        """Return a copy of the newest tokens of a row."""
        cells = (row, slice(None), slice(self._end - length, self._end))
        return LayerStates(self._keys[cells].clone(), self._values[cells].clone())

    def copy_row(self, row: int, *, to: int) -> None:
        """Copy all tokens of a row over another one."""
        for buffer in (self._keys, self._values):
            buffer[to, :, : self._end] = buffer[row, :, : self._end]

    def show(self, num_rows: int, *, width: int) -> None:
        """Select the rows, and the last `width` tokens of each, for the next forward pass."""
        self._rows, self._begin = num_rows, self._end - width

    def get_seq_length(self) -> int:
        """Return the number of selected columns."""
        return self._end - self._begin

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the newest column, and return all selected columns with it."""
        old, self._end = self._end, self._end + key_states.shape[2]
        self._keys[: self._rows, :, old : self._end] = key_states
        self._values[: self._rows, :, old : self._end] = value_states
        shown = (slice(self._rows), slice(None), slice(self._begin, self._end))
        return self._keys[shown], self._values[shown]


def _copied(old: Tensor, size: tuple[int, int], *, kept: Cells, to: Cells) -> Tensor:
    """Return a buffer of so many rows and columns: the kept cells of the old one, and 0."""
    made = old.new_zeros(size[0], old.shape[1], size[1], old.shape[3])
    made[to] = old[kept]
    return made


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
