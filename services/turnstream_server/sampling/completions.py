"""Requests for the completions of inference servers, and results from their answers.

The requests are those of vLLM 0.33.0 and SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from turnstream.errors import InvalidConfigError, UnavailableError
from turnstream.responses import from_openai
from turnstream_server.models.sampling_params import (
    SampledSequence,
    SampleResult,
    SamplingParams,
    StopReason,
    TopkLogprobs,
)
from turnstream_server.operations.samplers import SampleRequest

_VERSION: Final = 0
_REASONS: Final = {"stop": StopReason.STOP, "length": StopReason.LENGTH}


class ServedModel(NamedTuple):
    """The base model of a server: its name there, and the most tokens of a row."""

    name: str
    max_length: int


def require_supported(sample: SampleRequest, *, kind: str) -> None:
    """Raise InvalidConfigError for a field of the sample that a kind of server does not support."""
    params = sample.params
    if not sample.prompt.size:
        raise InvalidConfigError("prompt", "it is empty: one token or more is needed")
    refused: dict[str, str] = {}
    if kind == "vllm":
        if params.temperature:
            reason = "vLLM narrows its log-probabilities by it"
            refused |= dict.fromkeys(("top_k", "top_p"), reason)
        if params.logprob_temperature != 1.0:
            reason = f"vLLM computes it at temperature 1, not {params.temperature}"
            refused |= dict.fromkeys(("prompt_logprobs", "topk_prompt_logprobs"), reason)
    else:
        for name in ("prompt_logprobs", "topk_prompt_logprobs", "topk_sample_logprobs"):
            refused[name] = "completions of SGLang have none"
    defaults = SamplingParams()
    for name, reason in refused.items():
        if (value := getattr(params, name)) != getattr(defaults, name):
            raise InvalidConfigError(name, f"{value} is not supported: {reason}")


def completion_requests(
    sample: SampleRequest, *, kind: str, model: ServedModel, adapter: str
) -> list[dict[str, Any]]:
    """Return the bodies of the requests for a sample: one, or one for each seeded sequence.

    Servers differ in the seeds of the sequences of one request. InvalidConfigError for a row that
    is longer than the server's longest.
    """
    params = sample.params
    body = {
        "prompt": sample.prompt.tolist(),
        "max_tokens": _max_tokens(sample, model),
        "n": params.num_samples,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        # Else vLLM takes the values of the model's generation_config.json.
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop": list(params.stop_strings),
        "stop_token_ids": list(params.stop_ids or ()),
        "ignore_eos": params.stop_ids is not None,
        "skip_special_tokens": False,
        "logprobs": max(1, params.topk_sample_logprobs),
        "return_token_ids": True,
    }
    if kind == "vllm":
        body |= {"model": adapter or model.name, "return_tokens_as_token_ids": True}
        if params.prompt_logprobs or params.topk_prompt_logprobs:
            body["prompt_logprobs"] = params.topk_prompt_logprobs
    else:
        body |= {"model": model.name, "no_stop_trim": True}
        if adapter:
            body["lora_path"] = adapter
    if params.seed is None:
        return [body]
    seeds = np.random.SeedSequence(params.seed % 2**64).generate_state(params.num_samples)
    return [{**body, "n": 1, "seed": seed} for seed in (seeds >> 1).tolist()]


def result_of(sample: SampleRequest, answers: Sequence[Mapping[str, Any]]) -> SampleResult:
    """Return the result out of the answers; UnavailableError if a sequence was ended early."""
    params = sample.params
    sequences = [
        _sequence(sample, answer, index)
        for answer in answers
        for index in range(len(answer["choices"]))
    ]
    scores = answers[0]["choices"][0].get("prompt_logprobs") or []
    by_id = [None if each is None else _by_id(each) for each in scores]
    logprobs = None
    if params.prompt_logprobs:
        pairs = zip(by_id, sample.prompt.tolist(), strict=True)
        values = [np.nan if each is None else each[token] for each, token in pairs]
        logprobs = np.array(values, np.float32)
    return SampleResult(
        sequences=tuple(sequences),
        prompt_logprobs=logprobs,
        topk_prompt_logprobs=_topk(by_id, params.topk_prompt_logprobs),
        prompt_version=_VERSION,
    )


def _max_tokens(sample: SampleRequest, model: ServedModel) -> int:
    space = model.max_length - sample.prompt.size
    wanted = sample.params.max_tokens
    if space < max(1, wanted or 1):
        message = f"{sample.prompt.size} prompt tokens and {wanted or 1} to sample"
        raise InvalidConfigError(
            "max_tokens", f"{message} are more than the context of {model.max_length}"
        )
    return wanted or space


def _sequence(sample: SampleRequest, answer: Mapping[str, Any], index: int) -> SampledSequence:
    choice = answer["choices"][index]
    if (reason := choice.get("finish_reason")) not in _REASONS:
        raise UnavailableError(f"the server ended a sequence with finish_reason {reason!r}")
    turn = from_openai(choice, prompt_ids=sample.prompt)
    num_topk = sample.params.topk_sample_logprobs
    top = choice["logprobs"]["top_logprobs"] if num_topk else []
    by_id = [
        {int(name.removeprefix("token_id:")): value for name, value in each.items()} for each in top
    ]
    return SampledSequence(
        token_ids=np.array(turn["response_ids"], np.int32),
        logprobs=np.array(turn["logprobs"], np.float32),
        stop_reason=_REASONS[reason],
        version_runs=((_VERSION, len(turn["response_ids"])),),
        topk=_topk(by_id, num_topk),
    )


def _by_id(scores: Mapping[str, Mapping[str, Any]]) -> dict[int, float]:
    return {int(token): score["logprob"] for token, score in scores.items()}


def _topk(by_id: Sequence[Mapping[int, float] | None], count: int) -> TopkLogprobs | None:
    """Return the `count` most likely tokens of each position; a position without any has NaN."""
    if not count:
        return None
    rows = [
        [(0, np.nan)] * count
        if each is None
        else sorted(each.items(), key=lambda item: -item[1])[:count]
        for each in by_id
    ]
    pairs = np.array(rows, np.float64).reshape(len(rows), count, 2)
    return TopkLogprobs(pairs[..., 0].astype(np.int32), pairs[..., 1].astype(np.float32))
