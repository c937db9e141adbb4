"""Log-probabilities of recorded replies under a policy.

Shapes: B rows (always one), T tokens of the row, R response tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from turnstream import types
from turnstream.batching.merge.merging import merge_turns
from turnstream.types import Turn
from turnstream_server.models.logprobs import PaddedRows, response_logprobs


def score_turns(model: PreTrainedModel, turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns with the log-probability of every trained token.

    Turns that continue each other are one row, so a conversation costs one forward pass.
    """
    scored = list(turns)
    for row in merge_turns(turns):
        logprobs = _logprobs(model, row)
        for index, (begin, end) in zip(row.turns, row.turn_spans, strict=True):
            scored[index] = dataclasses.replace(turns[index], logprobs=logprobs[begin:end])
    return scored


@torch.no_grad()
def _logprobs(model: PreTrainedModel, row: types.Sequence) -> NDArray[np.float32]:
    """Return the log-probabilities, float32 (R,), 0.0 where the row is not trained."""
    ids_BT = torch.from_numpy(row.input_ids.astype(np.int64))[None].to(model.device)
    mask_BR = torch.from_numpy(row.loss_mask)[None].to(model.device)
    unpadded = PaddedRows(ids_BT, torch.ones_like(ids_BT))
    return response_logprobs(model, unpadded, mask_BR=mask_BR)[0].cpu().numpy()
