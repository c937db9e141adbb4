"""Parameters and results of sampling. Without torch, so that a front end does not load it.

Shapes: P prompt tokens, R sampled tokens, K most likely tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from turnstream.errors import InvalidConfigError
from turnstream_server.models.spec import LARGEST_TEMPERATURE, LEAST_TEMPERATURE


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one request. Invalid values raise an InvalidConfigError with the field.

    Attributes:
        max_tokens: most sampled tokens of a sequence; None for the rest of the context.
        temperature: divisor of the logits; 0 takes the most likely token.
        top_k: number of most likely tokens that can be sampled; -1 for all.
        top_p: share of probability of the most likely tokens that can be sampled. It is applied
            after `top_k`, to the renormalised rest; the most likely token always remains.
        stop_ids: tokens that end a sequence. None for the end tokens of the model, () for none.
        stop_strings: texts that end a sequence. They need a tokenizer.
        seed: equal seeds give equal tokens for equal prompts and weights, also in another batch.
            The samples of one request differ from each other. None for a random seed.
        num_samples: independent sequences of the same prompt.
        prompt_logprobs: also return the log-probability of every prompt token.
        topk_prompt_logprobs: also return so many most likely tokens at every prompt position.
        topk_sample_logprobs: also return so many most likely tokens at every sampled position.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop_ids: tuple[int, ...] | None = None
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None
    num_samples: int = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_at_least("max_tokens", self.max_tokens, 1)
        _check_at_least("num_samples", self.num_samples, 1)
        _check_at_least("topk_prompt_logprobs", self.topk_prompt_logprobs, 0)
        _check_at_least("topk_sample_logprobs", self.topk_sample_logprobs, 0)
        if self.top_k != -1:
            _check_at_least("top_k", self.top_k, 1)
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise InvalidConfigError("seed", f"{self.seed} is no integer of 64 bits")
        if self.temperature and not LEAST_TEMPERATURE <= self.temperature <= LARGEST_TEMPERATURE:
            message = f"is neither 0 nor from {LEAST_TEMPERATURE:g} to {LARGEST_TEMPERATURE:g}"
            raise InvalidConfigError("temperature", f"{self.temperature} {message}")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidConfigError("top_p", f"{self.top_p} is not above 0 and at most 1")
        _check_stops(self)

    @property
    def logprob_temperature(self) -> float:
        """Return the temperature of the reported log-probabilities: 1 for greedy sampling."""
        return self.temperature or 1.0


def _check_at_least(field: str, value: int, least: int) -> None:
    if isinstance(value, bool) or value != math.floor(value) or value < least:
        raise InvalidConfigError(field, f"{value} is no integer from {least} up")


def _check_stops(params: SamplingParams) -> None:
    if isinstance(params.stop_strings, str):
        message = f"{params.stop_strings!r} is one string: write a tuple of strings"
        raise InvalidConfigError("stop_strings", message)
    if "" in params.stop_strings:
        raise InvalidConfigError("stop_strings", "'' would end every sequence at once")
    negative = [token for token in params.stop_ids or () if token < 0]
    if negative:
        raise InvalidConfigError("stop_ids", f"{negative[0]} is below 0")


class StopReason(StrEnum):
    """Reason for the end of a sequence: a stop token or string, or `max_tokens`."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TopkLogprobs:
    """The K most likely tokens at every position, the most likely first.

    Attributes:
        token_ids: int32 (P or R, K).
        logprobs: float32 (P or R, K). At the first prompt position NaN, with token id 0.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """One sampled sequence.

    Attributes:
        token_ids: int32 (R,). The stop token, or the tokens of the stop string, are the last ones.
        logprobs: float32 (R,), in nats, of softmax(logits / temperature) over the whole vocabulary.
            `top_k` and `top_p` do not change them. Greedy sampling reports temperature 1.
        stop_reason: the reason for the end.
        version_runs: (policy version, tokens) in order, as `trajectory.append(version_runs=)`.
        text: decoded tokens, cut after the stop string; None without a tokenizer.
        topk: the most likely tokens at every position, if requested.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    stop_reason: StopReason
    version_runs: tuple[tuple[int, int], ...]
    text: str | None = None
    topk: TopkLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """Result of one request.

    Attributes:
        sequences: one for each of `num_samples`.
        prompt_logprobs: float32 (P,), if requested, at the temperature of the samples. The first
            is NaN: no token precedes it.
        topk_prompt_logprobs: the most likely tokens at every prompt position, if requested.
        prompt_version: policy version of the log-probabilities of the prompt.
    """

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: NDArray[np.float32] | None = None
    topk_prompt_logprobs: TopkLogprobs | None = None
    prompt_version: int = -1
