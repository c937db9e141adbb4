from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

import testkit
from turnstream.errors import InvalidConfigError
from turnstream.worker.tensors import to_torch
from turnstream_server.models.logprobs import response_logprobs
from turnstream_server.models.sampling import SampledTokens, choose_tokens, sample_tokens
from turnstream_server.models.sampling_params import SamplingParams

ModelOf = Callable[[str], PreTrainedModel]
Prompts = Sequence[NDArray[np.int32]]
RAGGED = [testkit.ids(text) for text in ("a", "hello world", "xyz", "abcdefgh")]
EQUAL = [testkit.ids("abc"), testkit.ids("xyz")]


def _sample(
    model: PreTrainedModel, prompts: Prompts = RAGGED, *, seed: int = 0, temperature: float = 0.7
) -> SampledTokens:
    params = SamplingParams(temperature=temperature)
    return sample_tokens(model, prompts, params=params, rng=np.random.default_rng(seed))


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


def _reference(
    logits: NDArray[np.float64], params: SamplingParams, draw: float
) -> tuple[int, float]:
    """Return the token and its log-probability, by loops in float64."""
    scaled = logits / params.logprob_temperature
    logprobs = scaled - np.log(np.exp(scaled - scaled.max()).sum()) - scaled.max()
    if params.temperature == 0:
        token = int(np.argmax(logits))
        return token, float(logprobs[token])
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if params.top_k != -1:
        order = order[: params.top_k]
    total, kept, mass = sum(np.exp(logprobs[order])), [], 0.0
    for token in order:
        if kept and params.top_p < 1 and mass >= params.top_p * total:
            break
        kept.append(token)
        mass += np.exp(logprobs[token])
    kept.sort()
    cumulative = np.cumsum(np.exp(logprobs[kept]))
    token = next(t for t, c in zip(kept, cumulative, strict=True) if c > draw * mass)
    return token, float(logprobs[token])


MIXED = [
    SamplingParams(),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.3),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.5),
    SamplingParams(temperature=2.0, top_k=9, top_p=0.8),
    SamplingParams(top_p=1e-9),
]


def test_chosen_tokens_agree_with_float64_loops_for_mixed_parameters() -> None:
    rng = np.random.default_rng(0)
    params = MIXED * 40
    logits_BV = rng.normal(scale=2.0, size=(len(params), 30)).astype(np.float32)
    draws = rng.random(len(params)).tolist()

    chosen = choose_tokens(torch.from_numpy(logits_BV), params=params, draws=draws)

    expected = [
        _reference(logits.astype(np.float64), own, draw)
        for logits, own, draw in zip(logits_BV, params, draws, strict=True)
    ]
    assert chosen.token_ids_B.tolist() == [token for token, _ in expected]
    np.testing.assert_allclose(chosen.logprobs_B, [each for _, each in expected], atol=1e-5)


def test_equal_logits_keep_exactly_top_k_tokens() -> None:
    draws = np.linspace(0, 1, 50, endpoint=False).tolist()

    chosen = choose_tokens(torch.zeros(50, 8), params=[SamplingParams(top_k=2)] * 50, draws=draws)

    assert sorted(set(chosen.token_ids_B.tolist())) == [0, 1]


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
def test_extreme_draws_choose_tokens_that_are_possible(draw: float) -> None:
    impossible = -torch.inf
    logits_BV = torch.tensor([[impossible, 0.0, 0.1, 0.2, impossible, impossible]])

    for own in (SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.99)):
        chosen = choose_tokens(logits_BV, params=[own], draws=[draw])
        assert chosen.token_ids_B.tolist() == [1 if draw == 0.0 else 3]


def test_logits_that_are_nan_give_logprobs_that_are_nan() -> None:
    logits_BV = torch.tensor([[0.0, torch.nan], [0.0, 0.0]])

    chosen = choose_tokens(logits_BV, params=[SamplingParams()] * 2, draws=[0.5, 0.5])

    assert chosen.logprobs_B.isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("num_samples", 0),
        ("num_samples", True),
        ("temperature", -0.5),
        ("temperature", 1e-6),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", 0),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("seed", 2**63),
        ("stop_ids", (5, -7)),
        ("stop_strings", "User:"),
        ("stop_strings", ("a", "")),
        ("topk_prompt_logprobs", -1),
        ("topk_sample_logprobs", -1),
    ],
)
def test_invalid_parameter_is_refused_with_field_and_value(field: str, value: Any) -> None:
    with pytest.raises(InvalidConfigError) as raised:
        SamplingParams(**{field: value})

    assert raised.value.field == field
    shown = value[-1] if isinstance(value, tuple) else value
    assert repr(shown) in raised.value.message


def test_greedy_parameters_report_logprobs_of_temperature_one() -> None:
    assert SamplingParams(temperature=0).logprob_temperature == 1.0
    assert SamplingParams(temperature=0.7).logprob_temperature == 0.7
