"""Requests of the sampler and the sequences that they consist of.

Shapes: P prompt tokens, R sampled tokens, K most likely tokens, V vocabulary.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from turnstream.errors import InvalidConfigError
from turnstream_server.models.decoding import LayerStates, PrefixStates, PromptLogprobs
from turnstream_server.models.fair_turns import ANYONE, Share
from turnstream_server.models.sampling_params import (
    SampledSequence,
    SampleResult,
    SamplingParams,
    StopReason,
    TopkLogprobs,
)

_CONTEXT_TOKENS: Final = 8
"""Prompt tokens in front of the stream. Some tokenizers drop a space at the start of a text."""
_TOKENS_PER_CHARACTER: Final = 4
"""A character has at most 4 bytes in UTF-8, and a token has at least one byte."""


class StopStringMatcher:
    """Reads sampled tokens one by one until a stop string is complete.

    A match may begin and end inside of tokens. Text of the prompt does not count. Only the last
    tokens are decoded, so a token costs the same at every length.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop_strings: Sequence[str], *, prompt_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = stop_strings
        self._overlap = max(map(len, stop_strings)) - 1
        self._window = _CONTEXT_TOKENS + _TOKENS_PER_CHARACTER * (self._overlap + 1)
        self._ids = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._text = decode(tokenizer, self._ids)
        self._prompt_end = len(self._text)

    def add(self, token_id: int) -> bool:
        """Add a token; return whether it completes a stop string."""
        if len(self._ids) >= 2 * self._window:
            self._ids = self._ids[-self._window :]
            self._text = decode(self._tokenizer, self._ids)
            self._prompt_end = 0
        self._ids.append(token_id)
        before, self._text = self._text, decode(self._tokenizer, self._ids)
        # A token that completes a character changes the text before it: search all of the window.
        is_longer = self._text.startswith(before)
        begin = max(self._prompt_end, len(before) - self._overlap if is_longer else 0)
        return first_end(self._text, self._stop_strings, begin=begin) is not None


def decode(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Return the text of tokens, with special tokens."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=False)


def first_end(text: str, stop_strings: Sequence[str], *, begin: int = 0) -> int | None:
    """Return the end of the stop string that is complete first, or None."""
    found = [(text.find(each, begin), len(each)) for each in stop_strings]
    return min((at + length for at, length in found if at >= 0), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Bounds of a model for requests: token ids, longest sequence, and the tokens that end one."""

    vocab_size: int
    max_positions: int
    end_ids: tuple[int, ...]


def limits_of(model: PreTrainedModel, *, max_tokens: int) -> ModelLimits:
    """Return the bounds of a model; sequences have at most `max_tokens` tokens in any case."""
    config = model.config.get_text_config()
    end_ids = getattr(model.generation_config, "eos_token_id", None)
    if end_ids is None:
        end_ids = config.eos_token_id
    context = getattr(config, "max_position_embeddings", None) or max_tokens
    return ModelLimits(
        vocab_size=int(config.vocab_size),
        max_positions=min(context, max_tokens),
        end_ids=() if end_ids is None else tuple(np.atleast_1d(end_ids).tolist()),
    )


class SharedPrefix(NamedTuple):
    """A prompt after its forward pass, for samples that start later."""

    logits_V: Tensor
    states: PrefixStates

    def copy(self) -> SharedPrefix:
        """Return a copy that shares no memory with the pass over the prompt."""
        states = [LayerStates(each[0].clone(), each[1].clone()) for each in self.states]
        return SharedPrefix(self.logits_V.clone(), states)


@dataclass(slots=True, kw_only=True, eq=False)
class SampleRequest:
    """A request that waits or runs.

    Attributes:
        adapter: adapter of the model that samples; "" for the model itself.
        future: its result. A cancelled future ends the request.
        prompt: log-probabilities of the prompt, once they are computed.
        shared: the prompt after its forward pass, while samples wait.
        num_waiting: samples that have not started.
    """

    prompt_ids: NDArray[np.int32]
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    tokenizer: Tokenizer | None = None
    adapter: str = ""
    future: Future[SampleResult] = field(default_factory=Future)
    prompt: PromptLogprobs | None = None
    prompt_version: int = -1
    shared: SharedPrefix | None = None
    num_waiting: int = field(init=False)
    share: Share = ANYONE
    _entropy: int = field(init=False)
    _results: dict[int, SampledSequence] = field(default_factory=dict)
    _is_settled: bool = False

    def __post_init__(self) -> None:
        self.num_waiting = self.params.num_samples
        self._entropy = _entropy(self.params.seed)

    @property
    def max_length(self) -> int:
        """Return the most tokens of each sequence, prompt included."""
        return len(self.prompt_ids) + self.max_tokens

    @property
    def num_uncached(self) -> int:
        """Return the tokens whose keys and values the next sequence computes."""
        return 0 if self.shared else len(self.prompt_ids)

    def is_over(self) -> bool:
        """Return whether the request has a result, has failed or is cancelled."""
        if not self._is_settled and self.future.cancelled():
            self._settle()
        return self._is_settled

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are still to be computed."""
        wanted = self.params.prompt_logprobs or self.params.topk_prompt_logprobs > 0
        return wanted and self.prompt is None

    def next_sequence(self) -> SampleSequence:
        """Return the next sequence; the sequences differ in their random numbers."""
        index = self.params.num_samples - self.num_waiting
        self.num_waiting -= 1
        seed = np.random.SeedSequence(self._entropy, spawn_key=(index,))
        return SampleSequence(self, index, np.random.default_rng(seed))

    def finish(self, index: int, sequence: SampledSequence) -> None:
        """Record a finished sequence. The last one completes the request."""
        self._results[index] = sequence
        is_last = len(self._results) == self.params.num_samples
        if is_last and not self.is_over() and self._settle():
            self.future.set_result(self._result())

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        if not self.is_over() and self._settle():
            self.future.set_exception(error)

    def cancel(self) -> None:
        """Cancel the request, if it is not over."""
        if not self.is_over() and self.future.cancel():
            self._settle()

    def _settle(self) -> bool:
        """Release the memory; return whether the future still waits, which it does once."""
        self._is_settled, self.shared = True, None
        return self.future.set_running_or_notify_cancel()

    def _result(self) -> SampleResult:
        prompt, wants_logprobs = self.prompt, self.params.prompt_logprobs
        return SampleResult(
            sequences=tuple(self._results[index] for index in sorted(self._results)),
            prompt_logprobs=prompt.logprobs if prompt and wants_logprobs else None,
            topk_prompt_logprobs=prompt.topk if prompt else None,
            prompt_version=self.prompt_version,
        )


def _entropy(seed: int | None) -> int:
    return secrets.randbits(128) if seed is None else seed % 2**64


class SampleSequence:
    """One sequence of a request: its tokens so far, and its random numbers.

    Attributes:
        paused: keys and values of all tokens but the last one, while the sequence is paused. None
            if they must be computed again.
    """

    def __init__(self, request: SampleRequest, index: int, rng: np.random.Generator) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.is_finished = False
        self.paused: PrefixStates | None = None
        self._index = index
        self._rng = rng
        self._logprobs: list[float] = []
        self._topk: list[tuple[list[int], list[float]]] = []
        self._versions: list[int] = []
        self._matcher: StopStringMatcher | None = None
        if request.params.stop_strings:
            assert request.tokenizer is not None
            prompt_ids = request.prompt_ids.tolist()
            strings = request.params.stop_strings
            self._matcher = StopStringMatcher(request.tokenizer, strings, prompt_ids=prompt_ids)

    @property
    def max_length(self) -> int:
        """Return the most tokens of the sequence, prompt included."""
        return self.request.max_length

    @property
    def num_cached(self) -> int:
        """Return the tokens whose keys and values a running or paused sequence has."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1

    @property
    def num_uncached(self) -> int:
        """Return the tokens whose keys and values are computed when the sequence starts."""
        return 0 if self.paused else self.num_cached + 1

    def prefix_ids(self) -> NDArray[np.int32]:
        """Return the prompt and the tokens so far, int32."""
        return np.concatenate((self.request.prompt_ids, np.array(self.token_ids, np.int32)))

    def draw(self) -> float:
        """Return the random number of the next token, from [0, 1)."""
        return self._rng.random()

    def add(
        self, token_id: int, logprob: float, *, version: int, topk: tuple[list[int], list[float]]
    ) -> None:
        """Record the next token, and finish the sequence at its end; NaN is an InvalidConfigError.

        `topk` has at least as many values as the request asks for.
        """
        if logprob != logprob:
            message = f"version {version} returned NaN for token {len(self.token_ids)} of a sample"
            raise InvalidConfigError("model", message)
        num_topk = self.request.params.topk_sample_logprobs
        self.token_ids.append(token_id)
        self._logprobs.append(logprob)
        self._topk.append((topk[0][:num_topk], topk[1][:num_topk]))
        self._versions.append(version)
        is_stopped = token_id in self.request.stop_ids or self._completes_string(token_id)
        if is_stopped or len(self.token_ids) == self.request.max_tokens:
            reason = StopReason.STOP if is_stopped else StopReason.LENGTH
            self.is_finished = True
            self.request.finish(self._index, self._sequence(reason))

    def _completes_string(self, token_id: int) -> bool:
        return self._matcher is not None and self._matcher.add(token_id)

    def _sequence(self, reason: StopReason) -> SampledSequence:
        topk = None
        if self.request.params.topk_sample_logprobs:
            ids, logprobs = zip(*self._topk, strict=True)
            topk = TopkLogprobs(np.array(ids, np.int32), np.array(logprobs, np.float32))
        return SampledSequence(
            token_ids=np.array(self.token_ids, np.int32),
            logprobs=np.array(self._logprobs, np.float32),
            stop_reason=reason,
            version_runs=tuple((v, len(list(run))) for v, run in groupby(self._versions)),
            text=self._text(),
            topk=topk,
        )

    def _text(self) -> str | None:
        if self.request.tokenizer is None:
            return None
        text = decode(self.request.tokenizer, self.token_ids)
        return text[: first_end(text, self.request.params.stop_strings)]


def new_request(
    prompt_ids: Sequence[int] | ArrayLike,
    params: SamplingParams,
    *,
    limits: ModelLimits,
    tokenizer: Tokenizer | None,
    adapter: str = "",
    share: Share = ANYONE,
) -> SampleRequest:
    """Return a request; an InvalidConfigError names the field and the value that is wrong."""
    ids = _checked_prompt(prompt_ids, limits=limits)
    space = limits.max_positions - len(ids)
    max_tokens = space if params.max_tokens is None else params.max_tokens
    if not 1 <= max_tokens <= space:
        message = f"{len(ids)} prompt tokens and {max(max_tokens, 1)} to sample"
        raise InvalidConfigError(
            "max_tokens", f"{message} are more than the context of {limits.max_positions}"
        )
    stop_ids = limits.end_ids if params.stop_ids is None else params.stop_ids
    if unknown := [token for token in stop_ids if token >= limits.vocab_size]:
        message = f"{unknown[0]} is not below the vocabulary size {limits.vocab_size}"
        raise InvalidConfigError("stop_ids", message)
    for name in ("top_k", "topk_prompt_logprobs", "topk_sample_logprobs"):
        if getattr(params, name) > limits.vocab_size:
            message = f"{getattr(params, name)} is above the vocabulary size {limits.vocab_size}"
            raise InvalidConfigError(name, message)
    if params.stop_strings and tokenizer is None:
        message = f"{params.stop_strings[0]!r} needs a tokenizer: pass one to the sampler"
        raise InvalidConfigError("stop_strings", message)
    return SampleRequest(
        prompt_ids=ids,
        params=params,
        max_tokens=max_tokens,
        stop_ids=frozenset(stop_ids),
        tokenizer=tokenizer,
        adapter=adapter,
        share=share,
    )


def _checked_prompt(
    prompt_ids: Sequence[int] | ArrayLike, *, limits: ModelLimits
) -> NDArray[np.int32]:
    ids = np.asarray(prompt_ids)
    if ids.ndim != 1 or not ids.size:
        raise InvalidConfigError("prompt_ids", f"shape {ids.shape}: one token or more is needed")
    if ids.dtype.kind not in "iu":
        raise InvalidConfigError("prompt_ids", f"{ids.dtype} is no integer type")
    (wrong,) = np.nonzero((ids < 0) | (ids >= limits.vocab_size))
    if wrong.size:
        message = f"token {ids[wrong[0]]} at position {wrong[0]} is not in the vocabulary"
        raise InvalidConfigError("prompt_ids", f"{message} of {limits.vocab_size}")
    return ids.astype(np.int32)
