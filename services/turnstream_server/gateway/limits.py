"""Limits of a base model, checked before a worker sees a call.

Every error names the datum, the field, the value and the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.rows.operations import Operation
from turnstream.errors import BatchingError
from turnstream_server.gateway.tinker.sample_calls import Sampling
from turnstream_server.operations.models import BaseModel

MAX_RESULT_VALUES: Final = 1 << 22
"""Most log-probabilities of a sampling call: 16 samples of 262,144 tokens, for example."""


def check_operation_limits(operation: Operation, base: BaseModel) -> Operation:
    """Return the operation; BatchingError for too long a row, or an unknown token id.

    A position has as many targets as there are ids at most.
    """
    for place, datum in enumerate(operation.data):
        num_tokens = len(datum.model_input)
        if num_tokens > base.context_length:
            limit = f"the context of {base.name} has {base.context_length}"
            raise BatchingError(f"datum {place}: model_input has {num_tokens} tokens, {limit}")
        shape = datum.target_tokens.shape
        if max(shape[1:], default=0) > base.vocab_size:
            limit = f"expected at most {base.vocab_size} targets a position, the ids of {base.name}"
            raise BatchingError(f"datum {place}: target_tokens has the shape {shape}, {limit}")
    inputs = [datum.model_input for datum in operation.data]
    targets = [datum.target_tokens for datum in operation.data]
    for name, arrays in (("model_input", inputs), ("target_tokens", targets)):
        _check_ids(name, arrays, base)
    return operation


def check_sampling_limits(sampling: Sampling, base: BaseModel) -> Sampling:
    """Return the sampling; BatchingError for what the base model cannot serve."""
    prompt, params = sampling
    # Without max_tokens a sequence ends with the context, after one token at least.
    wanted = 1 if params.max_tokens is None else params.max_tokens
    if len(prompt) + wanted > base.context_length:
        lengths = f"prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}"
        raise BatchingError(f"{lengths}: the context of {base.name} has {base.context_length}")
    wrong = np.flatnonzero(_is_outside(prompt, base))
    if len(wrong):
        raise BatchingError(_wrong_id("prompt", int(wrong[0]), prompt[wrong[0]], base))
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        count = getattr(params, name)
        if count > base.vocab_size:
            limit = f"{base.name} has {base.vocab_size} tokens"
            raise BatchingError(f"{name} is {count}: {limit}")
    _require_small_result(sampling, base)
    return sampling


def _require_small_result(sampling: Sampling, base: BaseModel) -> None:
    """Raise BatchingError if the result may have too many values: limits multiply."""
    prompt, params = sampling
    left = base.context_length - len(prompt)
    max_tokens = left if params.max_tokens is None else params.max_tokens
    num_values = len(prompt) * (1 + params.topk_prompt_logprobs)
    num_values += params.num_samples * max_tokens * (1 + params.topk_sample_logprobs)
    if num_values > MAX_RESULT_VALUES:
        raise BatchingError(
            f"the result may have {num_values} values, expected at most {MAX_RESULT_VALUES}: "
            f"num_samples {params.num_samples} x max_tokens {max_tokens} x (1 + "
            f"topk_sample_logprobs {params.topk_sample_logprobs}) + {len(prompt)} prompt tokens x "
            f"(1 + topk_prompt_logprobs {params.topk_prompt_logprobs})"
        )


def _check_ids(name: str, arrays: Sequence[NDArray[Any]], base: BaseModel) -> None:
    if not _is_outside(np.concatenate([each.ravel() for each in arrays]), base).any():
        return
    for datum, array in enumerate(arrays):
        wrong = np.argwhere(_is_outside(array, base))
        if len(wrong):
            place = tuple(wrong[0].tolist())
            position = place[0] if len(place) == 1 else place
            named = f"datum {datum}, {name}"
            raise BatchingError(_wrong_id(named, position, array[place], base))


def _is_outside(ids: NDArray[Any], base: BaseModel) -> NDArray[np.bool_]:
    return (ids < 0) | (ids >= base.vocab_size)


def _wrong_id(name: str, position: object, value: Any, base: BaseModel) -> str:
    limit = f"{base.name} has the ids 0 to {base.vocab_size - 1}"
    return f"{name}: token {position} is {int(value)}, {limit}"
