"""Numbers of the sampler, against a loop in float64 that has no cache and no batch."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from turnstream.errors import InvalidConfigError, RejectedError
from turnstream_server.models.fair_turns import BatchLimits
from turnstream_server.models.packed import enable_packing
from turnstream_server.models.policy import load_policy
from turnstream_server.models.sampler import Sampler
from turnstream_server.models.sampling_params import (
    SampleResult,
    SamplingParams,
    StopReason,
    TopkLogprobs,
)
from turnstream_server.models.spec import SmallModelSpec

VOCAB_SIZE = 64
ARCHITECTURES = ["qwen2", "llama", "sliding", "packing"]


@cache
def tiny_model(architecture: str) -> PreTrainedModel:
    """A model of two layers; "sliding" attends to 4 tokens, with shared keys and values.

    "packing" is a model that a trainer has prepared for packed rows.
    """
    if architecture == "packing":
        model = copy.deepcopy(tiny_model("qwen2"))
        enable_packing(model)
        return model
    if architecture != "sliding":
        spec = SmallModelSpec(architecture=architecture, vocab_size=VOCAB_SIZE, hidden_size=32)
        return load_policy(spec)
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
        max_position_embeddings=128,
        eos_token_id=None,
    )
    assert set(config.layer_types) == {"full_attention", "sliding_attention"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


class Expected(NamedTuple):
    """The tokens of a sequence, and all log-probabilities at their positions, (R, V)."""

    token_ids: list[int]
    logprobs: NDArray[np.float64]


@torch.no_grad()
def slow_logprobs(model: PreTrainedModel, ids: Sequence[int], temperature: float) -> torch.Tensor:
    """Return float64 (T, V): log-probabilities of the token after each one."""
    exact = copy.deepcopy(model).double()
    logits_TV = exact(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    return (logits_TV / temperature).log_softmax(-1)


def slow_sample(
    model: PreTrainedModel, prompt_ids: Sequence[int], params: SamplingParams, *, index: int = 0
) -> Expected:
    """Sample without `top_k` and `top_p`, one token after another."""
    assert params.seed is not None
    assert params.max_tokens is not None
    seeds = np.random.SeedSequence(params.seed % 2**64).spawn(params.num_samples)
    rng = np.random.default_rng(seeds[index])
    ids, rows = list(prompt_ids), []
    for _ in range(params.max_tokens):
        logprobs_V = slow_logprobs(model, ids, params.logprob_temperature)[-1]
        cumulative_V, draw = logprobs_V.exp().cumsum(0), rng.random()
        likeliest = int(logprobs_V.argmax())
        drawn = int((cumulative_V <= draw * cumulative_V[-1]).sum())
        ids.append(likeliest if params.temperature == 0 else drawn)
        rows.append(logprobs_V.numpy())
        if ids[-1] in (params.stop_ids or ()):
            break
    return Expected(ids[len(prompt_ids) :], np.stack(rows))


def make_prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, VOCAB_SIZE, size=1 + 5 * at % 17).tolist() for at in range(count)]


def results(futures: Sequence[Future[SampleResult]]) -> list[SampleResult]:
    return [future.result(timeout=60) for future in futures]


@pytest.fixture
def sampler() -> Iterator[Sampler]:
    with Sampler(tiny_model("qwen2")) as made:
        yield made


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_crowd_agrees_with_a_float64_loop_without_cache(architecture: str) -> None:
    model, prompts = tiny_model(architecture), make_prompts(7)
    params = [
        SamplingParams(
            max_tokens=3 + 4 * (at % 3),
            temperature=(1.0, 0.0, 0.6)[at % 3],
            seed=at - 3,
            num_samples=1 + at % 2,
            stop_ids=(1, 2, 3),
            topk_sample_logprobs=at % 3,
        )
        for at in range(7)
    ]

    with Sampler(model, limits=BatchLimits(max_sequences=3)) as sampler:
        found = results([sampler.submit(*each) for each in zip(prompts, params, strict=True)])

    for prompt, own, result in zip(prompts, params, found, strict=True):
        assert len(result.sequences) == own.num_samples
        for index, sequence in enumerate(result.sequences):
            expected = slow_sample(model, prompt, own, index=index)
            assert sequence.token_ids.tolist() == expected.token_ids
            chosen = expected.logprobs[np.arange(len(expected.token_ids)), expected.token_ids]
            np.testing.assert_allclose(sequence.logprobs, chosen, atol=1e-5)
            _check_topk(sequence.topk, expected.logprobs, own.topk_sample_logprobs)


def _check_topk(
    found: TopkLogprobs | None,
    logprobs_TV: NDArray[np.float64],
    num_topk: int,
    *,
    atol: float = 1e-5,
) -> None:
    """Check the values and, since likely tokens may be about equal, the tokens by their values."""
    if not num_topk:
        assert found is None
        return
    assert found is not None
    highest = -np.sort(-logprobs_TV, axis=1)[:, :num_topk]
    np.testing.assert_allclose(found.logprobs, highest, atol=atol)
    own = np.take_along_axis(logprobs_TV, found.token_ids.astype(np.int64), axis=1)
    np.testing.assert_allclose(own, highest, atol=atol)
    assert all(len(set(row)) == num_topk for row in found.token_ids.tolist())


def test_requests_without_a_seed_differ(sampler: Sampler) -> None:
    params = SamplingParams(max_tokens=30, stop_ids=())

    one, two = results([sampler.submit([1], params), sampler.submit([1], params)])

    assert one.sequences[0].token_ids.tolist() != two.sequences[0].token_ids.tolist()


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2"])
def test_prompt_logprobs_agree_with_float64(
    architecture: str, monkeypatch: pytest.MonkeyPatch, model_of: Callable[[str], PreTrainedModel]
) -> None:
    # Chunks of 4 positions. The head of gemma2 is not linear.
    monkeypatch.setattr("turnstream_server.models.logprobs._CHUNK_VALUES", 4 * 128)
    model, prompt = model_of(architecture), list(range(30, 41))
    params = SamplingParams(
        max_tokens=1, temperature=2.0, prompt_logprobs=True, topk_prompt_logprobs=3
    )

    with Sampler(model, version=4) as sampler:
        only_topk = sampler.submit(prompt, SamplingParams(max_tokens=1, topk_prompt_logprobs=1))
        result, without = results([sampler.submit(prompt, params), only_topk])

    logprobs_TV = slow_logprobs(model, prompt, 2.0)
    assert result.prompt_logprobs is not None
    assert result.topk_prompt_logprobs is not None
    expected = logprobs_TV[torch.arange(10), prompt[1:]]
    np.testing.assert_allclose(result.prompt_logprobs[1:], expected, atol=1e-4)
    topk = result.topk_prompt_logprobs
    assert topk.token_ids[0].tolist() == [0, 0, 0]
    assert np.isnan(topk.logprobs[0]).all()
    rest = TopkLogprobs(topk.token_ids[1:], topk.logprobs[1:])
    _check_topk(rest, logprobs_TV[:-1].numpy(), 3, atol=1e-4)
    assert result.prompt_version == 4
    assert without.prompt_logprobs is None
    assert without.topk_prompt_logprobs is not None


def test_stop_token_is_the_last_one_and_end_tokens_are_the_default() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    free = SamplingParams(max_tokens=12, seed=2, stop_ids=())
    with Sampler(model) as sampler:
        tokens = results([sampler.submit([9], free)])[0].sequences[0].token_ids.tolist()
    stop = tokens[4]
    first = tokens.index(stop) + 1
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [stop, 63]

    with Sampler(model) as sampler:
        by_default, named, none = (
            result.sequences[0]
            for result in results(
                [
                    sampler.submit([9], SamplingParams(max_tokens=12, seed=2)),
                    sampler.submit([9], SamplingParams(max_tokens=12, seed=2, stop_ids=(stop,))),
                    sampler.submit([9], free),
                ]
            )
        )

    assert by_default.token_ids.tolist() == named.token_ids.tolist() == tokens[:first]
    assert by_default.stop_reason == named.stop_reason == StopReason.STOP
    assert (none.token_ids.tolist(), none.stop_reason) == (tokens, StopReason.LENGTH)


def _tokenizer() -> Tokenizer:
    """Return a tokenizer whose token n is the text `n;`."""
    vocab = {f"{token};": token for token in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="0;"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def test_stop_string_keeps_its_tokens_and_cuts_the_text() -> None:
    params = SamplingParams(max_tokens=20, seed=5, stop_ids=())
    with Sampler(tiny_model("qwen2"), tokenizer=_tokenizer()) as sampler:
        (free,) = results([sampler.submit([1, 2], params)])[0].sequences
        tokens = free.token_ids.tolist()
        # Begins in the middle of a token of two digits, and ends with a digit of another.
        at = next(n for n in range(5, 18) if tokens[n] > 9 and tokens[n + 1] > 9)
        stop = f"{tokens[at] % 10};{tokens[at + 1] // 10}"
        stopping = SamplingParams(max_tokens=20, seed=5, stop_ids=(), stop_strings=(stop, "x"))
        (stopped,) = results([sampler.submit([1, 2], stopping)])[0].sequences

    text = "".join(f"{token};" for token in tokens)
    assert free.text == text
    assert stopped.text == text[: text.index(stop) + len(stop)]
    assert stopped.stop_reason == StopReason.STOP
    end = next(n for n in range(20) if stop in "".join(f"{token};" for token in tokens[:n]))
    assert stopped.token_ids.tolist() == tokens[:end]


def test_threads_and_coroutines_submit_at_the_same_time(sampler: Sampler) -> None:
    params = [SamplingParams(max_tokens=10, seed=seed, stop_ids=()) for seed in range(16)]
    expected = [results([sampler.submit([seed], own)])[0] for seed, own in enumerate(params)]

    with ThreadPoolExecutor(8) as pool:
        found = results(
            list(pool.map(lambda seed: sampler.submit([seed], params[seed]), range(16)))
        )

    async def sample(seed: int) -> SampleResult:
        return await asyncio.wrap_future(sampler.submit([seed], params[seed]))

    async def sample_all() -> list[SampleResult]:
        return await asyncio.gather(*map(sample, range(16)))

    for results_ in (found, asyncio.run(sample_all())):
        for one, other in zip(expected, results_, strict=True):
            assert one.sequences[0].token_ids.tolist() == other.sequences[0].token_ids.tolist()


def test_new_weights_are_loaded_between_two_steps(sampler: Sampler) -> None:
    other = tiny_model("llama")
    running = sampler.submit([3], SamplingParams(max_tokens=100, seed=1, stop_ids=()))

    sampler.update_weights(7, lambda: other)
    later = sampler.submit([3], SamplingParams(max_tokens=4, seed=1, stop_ids=()))

    (new,) = results([later])[0].sequences
    (old,) = results([running])[0].sequences
    assert new.version_runs == ((7, 4),)
    expected = slow_sample(other, [3], SamplingParams(max_tokens=4, seed=1))
    assert new.token_ids.tolist() == expected.token_ids
    assert sum(count for _, count in old.version_runs) == 100
    assert [version for version, _ in old.version_runs][-1] == 7


def test_weights_that_do_not_load_leave_the_old_ones(sampler: Sampler) -> None:
    def fail() -> PreTrainedModel:
        raise InvalidConfigError("policy", "nowhere does not load")

    params = SamplingParams(max_tokens=5, seed=1, stop_ids=())
    (before,) = results([sampler.submit([3], params)])[0].sequences

    with pytest.raises(InvalidConfigError, match="nowhere"):
        sampler.update_weights(7, fail)

    (after,) = results([sampler.submit([3], params)])[0].sequences
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert after.version_runs == before.version_runs == ((-1, 5),)


def test_closed_sampler_cancels_and_refuses_requests() -> None:
    sampler = Sampler(tiny_model("qwen2"), limits=BatchLimits(max_sequences=1))
    futures = [sampler.submit([1], SamplingParams(max_tokens=400, stop_ids=())) for _ in range(3)]

    sampler.close()
    sampler.close()

    assert futures[-1].cancelled()
    assert all(future.done() for future in futures)
    with pytest.raises(RejectedError, match="closed"):
        sampler.submit([1])


def test_more_requests_than_allowed_are_refused_until_others_end() -> None:
    with Sampler(tiny_model("qwen2"), max_requests=2) as sampler:
        waiting = [sampler.submit([1], SamplingParams(max_tokens=400, stop_ids=())) for _ in "ab"]
        with pytest.raises(RejectedError, match="2 requests") as refused:
            sampler.submit([1])
        waiting[0].cancel()
        results([sampler.submit([1], SamplingParams(max_tokens=1))])

    assert refused.value.retry_after_s == 1.0
