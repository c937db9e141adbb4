from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from testkit import turn
from turnstream.types import Turn
from turnstream_server.models.logprobs import score_turns
from turnstream_server.models.policy import load_policy
from turnstream_server.models.spec import SmallModelSpec


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_policy(
        SmallModelSpec(vocab_size=128, hidden_size=16, intermediate_size=16, num_heads=2)
    )


@torch.no_grad()
def scored_alone(model: PreTrainedModel, turn: Turn) -> list[float]:
    """Log-probabilities of one response, by a forward pass over this turn alone."""
    ids = torch.tensor([[*turn.prompt_ids.tolist(), *turn.response_ids.tolist()]])
    logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
    first = len(turn.prompt_ids)
    return [
        float(logprobs[first + position - 1, token])
        for position, token in enumerate(turn.response_ids.tolist())
    ]


@pytest.mark.parametrize(
    "turns",
    [
        [turn("ab", "CD")],
        [turn("ab", "CD"), turn("abcde", "FG"), turn("abcdefghi", "J")],
        [turn("ab", "CD"), turn("xyz", "FG")],
        [turn("ab", "CD"), turn("abcde", "F"), turn("abcdg", "HI")],
    ],
    ids=["one turn", "a chain", "an edited context", "a branch"],
)
def test_every_reply_is_scored_as_in_its_own_context(
    model: PreTrainedModel, turns: list[Turn]
) -> None:
    scored = score_turns(model, turns)

    for given, with_logprobs in zip(turns, scored, strict=True):
        assert np.array_equal(with_logprobs.prompt_ids, given.prompt_ids)
        assert np.array_equal(with_logprobs.response_ids, given.response_ids)
        assert with_logprobs.logprobs is not None
        assert with_logprobs.logprobs == pytest.approx(scored_alone(model, given), abs=1e-5)
