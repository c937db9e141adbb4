from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import testkit
from turnstream.worker.tensors import to_torch
from turnstream_server.models.logprobs import response_logprobs
from turnstream_server.models.sampling import SampledResponse, sample_batch

ModelOf = Callable[[str], PreTrainedModel]
PROMPTS = [testkit.ids(text) for text in ("a", "hello world", "xyz", "abcdefgh")]
STOP = frozenset(range(40))


def _sample(model: PreTrainedModel, *, seed: int = 0, **changes: object) -> list[SampledResponse]:
    arguments = {"max_new_tokens": 12, "stop_ids": STOP, "temperature": 0.7, **changes}
    generator = torch.Generator().manual_seed(seed)
    return sample_batch(model, PROMPTS, generator=generator, **arguments)  # pyright: ignore[reportArgumentType] - of a dict


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2", "gemma2"])
def test_sampled_logprobs_agree_with_what_the_trainer_computes(
    model_of: ModelOf, architecture: str
) -> None:
    model = model_of(architecture)

    responses = _sample(model)

    assert len({len(response.token_ids) for response in responses}) > 1
    for prompt, response in zip(PROMPTS, responses, strict=True):
        text = "".join(map(chr, prompt)) + "|"
        row = testkit.mini_batch(text + "X" * len(response.token_ids))
        row.rows.input_ids.values[len(prompt) :] = response.token_ids
        tensors = to_torch(row)
        scores_BR = response_logprobs(model, tensors, mask_BR=tensors.loss_mask_BR, temperature=0.7)
        np.testing.assert_allclose(scores_BR[0].detach().numpy(), response.logprobs, atol=1e-4)


def test_prompts_of_one_length_need_no_mask_and_agree_too(model_of: ModelOf) -> None:
    model = model_of("qwen2")
    generator = torch.Generator().manual_seed(0)
    prompts = [testkit.ids("abc"), testkit.ids("xyz")]

    together = sample_batch(model, prompts, max_new_tokens=1, generator=generator)

    for prompt, response in zip(prompts, together, strict=True):
        logits_V = model(input_ids=torch.from_numpy(prompt).long()[None]).logits[0, -1]
        expected = torch.log_softmax(logits_V, dim=-1)[int(response.token_ids[0])].item()
        assert response.logprobs[0] == pytest.approx(expected, abs=1e-5)


def test_the_same_seed_gives_the_same_responses_and_another_seed_others(
    model_of: ModelOf,
) -> None:
    model = model_of("qwen2")

    first, again, other = _sample(model), _sample(model), _sample(model, seed=1)

    assert _tokens(first) == _tokens(again)
    assert _tokens(first) != _tokens(other)


def test_a_response_ends_with_its_first_stop_token_or_at_the_limit(model_of: ModelOf) -> None:
    responses = _sample(model_of("qwen2"), max_new_tokens=4)

    for response in responses:
        *before, last = response.token_ids.tolist()
        assert not STOP.intersection(before)
        assert response.is_stopped == (last in STOP)
        assert response.is_stopped or len(response.token_ids) == 4
        assert response.token_ids.dtype == np.int32
        assert response.logprobs.dtype == np.float32
        assert len(response.logprobs) == len(response.token_ids)
    assert len({response.is_stopped for response in responses}) == 2


def test_a_low_temperature_takes_the_likeliest_token(model_of: ModelOf) -> None:
    model = model_of("qwen2")

    responses = _sample(model, temperature=1e-3, max_new_tokens=1)

    for prompt, response in zip(PROMPTS, responses, strict=True):
        logits_V = model(input_ids=torch.from_numpy(prompt).long()[None]).logits[0, -1]
        assert response.token_ids.tolist() == [int(logits_V.argmax())]


def test_no_prompt_gives_no_response(model_of: ModelOf) -> None:
    assert sample_batch(model_of("qwen2"), [], max_new_tokens=1, generator=torch.Generator()) == []


def _tokens(responses: list[SampledResponse]) -> list[list[int]]:
    return [response.token_ids.tolist() for response in responses]
