from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

import testkit
from turnstream.worker.tensors import to_torch
from turnstream_server.models.logprobs import response_logprobs
from turnstream_server.models.sampling import SampledTokens, sample_tokens

ModelOf = Callable[[str], PreTrainedModel]
Prompts = Sequence[NDArray[np.int32]]
RAGGED = [testkit.ids(text) for text in ("a", "hello world", "xyz", "abcdefgh")]
EQUAL = [testkit.ids("abc"), testkit.ids("xyz")]


def _sample(
    model: PreTrainedModel, prompts: Prompts = RAGGED, *, seed: int = 0, temperature: float = 0.7
) -> SampledTokens:
    generator = torch.Generator().manual_seed(seed)
    return sample_tokens(model, prompts, temperature=temperature, generator=generator)


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("prompts", [RAGGED, EQUAL], ids=["ragged", "equal"])
def test_sampled_logprobs_agree_with_what_the_trainer_computes(
    model_of: ModelOf, architecture: str, prompts: Prompts
) -> None:
    model = model_of(architecture)

    sampled = _sample(model, prompts)

    assert (sampled.token_ids.dtype, sampled.logprobs.dtype) == (np.int32, np.float32)
    for prompt, token_ids, logprobs in zip(prompts, *sampled, strict=True):
        row = testkit.mini_batch("".join(map(chr, prompt)) + "|X")
        row.rows.input_ids.values[len(prompt) :] = token_ids
        tensors = to_torch(row)
        scores_BR = response_logprobs(model, tensors, mask_BR=tensors.loss_mask_BR, temperature=0.7)
        np.testing.assert_allclose(scores_BR[0].detach().numpy(), logprobs, atol=1e-4)


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(model_of: ModelOf) -> None:
    model = model_of("qwen2")

    first, again, other = _sample(model), _sample(model), _sample(model, seed=1)

    assert first.token_ids.tolist() == again.token_ids.tolist()
    assert first.token_ids.tolist() != other.token_ids.tolist()


def test_a_low_temperature_takes_the_likeliest_token(model_of: ModelOf) -> None:
    model = model_of("qwen2")

    sampled = _sample(model, temperature=1e-3)

    for prompt, token_ids in zip(RAGGED, sampled.token_ids, strict=True):
        logits_V = model(input_ids=torch.from_numpy(prompt).long()[None]).logits[0, -1]
        assert token_ids.tolist() == [int(logits_V.argmax())]
