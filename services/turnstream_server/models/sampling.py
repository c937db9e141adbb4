"""Choice of tokens from logits, and one token for many prompts at once.

Shapes: B rows, T columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from turnstream_server.models.sampling_params import SamplingParams


class ChosenTokens(NamedTuple):
    """Chosen tokens, int64 (B,), and the log-probabilities of all tokens, float32 (B, V)."""

    token_ids_B: Tensor
    logprobs_BV: Tensor

    @property
    def logprobs_B(self) -> Tensor:
        """Return the log-probabilities of the chosen tokens, float32 (B,)."""
        return self.logprobs_BV.gather(1, self.token_ids_B[:, None])[:, 0]


def choose_tokens(
    logits_BV: Tensor, *, params: Sequence[SamplingParams], draws: Sequence[float]
) -> ChosenTokens:
    """Return a token for every row of logits.

    A draw from [0, 1) selects the token at which the cumulative probability, in the order of token
    ids, exceeds it. So a token depends on its own row and its own draw alone. The log-probabilities
    are of softmax(logits / temperature) over the whole vocabulary. `top_k` and `top_p` narrow the
    choice and leave these log-probabilities as they are.

    Args:
        logits_BV: any float type; logits that are NaN give log-probabilities that are NaN.
        params: parameters of every row. Rows with temperature 0 take the first most likely token.
        draws: one number for each row, in double precision.

    >>> logits = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    >>> greedy, sampled = SamplingParams(temperature=0), SamplingParams()
    >>> choose_tokens(logits, params=[greedy, sampled], draws=[0.1, 0.1]).token_ids_B
    tensor([1, 0])
    """
    temperatures = [each.logprob_temperature for each in params]
    scores_BV = logits_BV.float()
    if any(each != 1.0 for each in temperatures):
        scores_BV = scores_BV / scores_BV.new_tensor(temperatures)[:, None]
    logprobs_BV = scores_BV.log_softmax(-1)
    weights_BV = logprobs_BV.double().exp_()
    narrowed = [row for row, each in enumerate(params) if each.top_k != -1 or each.top_p < 1.0]
    if narrowed:
        own = [params[row] for row in narrowed]
        weights_BV[narrowed] = _narrowed_weights(weights_BV[narrowed], own)
    token_ids_B = _at_draw(weights_BV, draws)
    greedy = [row for row, each in enumerate(params) if each.temperature == 0.0]
    if greedy:
        token_ids_B[greedy] = logits_BV[greedy].argmax(-1)
    return ChosenTokens(token_ids_B, logprobs_BV)


def _narrowed_weights(weights_BV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the probabilities with 0 for every token outside of `top_k` and `top_p`."""
    num_tokens = weights_BV.shape[1]
    sorted_BV, order_BV = weights_BV.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(num_tokens, device=weights_BV.device)
    top_k_B = ranks_V.new_tensor([num_tokens if p.top_k == -1 else p.top_k for p in params])
    sorted_BV = sorted_BV.masked_fill(ranks_V >= top_k_B[:, None], 0.0)
    shares_B = weights_BV.new_tensor([each.top_p for each in params]) * sorted_BV.sum(-1)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    is_out_BV = (before_BV >= shares_B[:, None]) & (ranks_V > 0)
    kept_BV = sorted_BV.masked_fill(is_out_BV, 0.0)
    return torch.zeros_like(weights_BV).scatter_(1, order_BV, kept_BV)


def _at_draw(weights_BV: Tensor, draws: Sequence[float]) -> Tensor:
    """Return the first token whose cumulative weight exceeds draw * total weight, int64 (B,)."""
    cumulative_BV = weights_BV.cumsum(-1)
    targets_B1 = cumulative_BV[:, -1:] * cumulative_BV.new_tensor(draws)[:, None]
    token_ids_B1 = torch.searchsorted(cumulative_BV, targets_B1, right=True)
    return token_ids_B1[:, 0].clamp_(max=weights_BV.shape[1] - 1)  # NaN has no position


class SampledTokens(NamedTuple):
    """One token for each prompt, int32 (B, 1), and its log-probability in nats, float32 (B, 1)."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@torch.inference_mode()
def sample_tokens(
    model: PreTrainedModel,
    prompts: Sequence[NDArray[np.int32]],
    *,
    params: SamplingParams,
    rng: np.random.Generator,
) -> SampledTokens:
    """Return a token for every prompt, in their order; equal states of `rng` give equal tokens."""
    rows = [torch.from_numpy(prompt).long() for prompt in prompts]
    ids_BT = pad_sequence(rows, batch_first=True).to(model.device)
    last_B = torch.tensor([len(row) - 1 for row in rows], device=model.device)
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    logits_BV = logits_BTV[torch.arange(len(rows), device=model.device), last_B]
    draws = rng.random(len(rows)).tolist()
    chosen = choose_tokens(logits_BV, params=[params] * len(rows), draws=draws)
    ids_B, logprobs_B = chosen.token_ids_B.int().cpu(), chosen.logprobs_B.cpu()
    return SampledTokens(ids_B[:, None].numpy(), logprobs_B[:, None].numpy())
