"""The body of an `asample`: a prompt, and how to sample from it."""

from __future__ import annotations

from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr

from turnstream.errors import BatchingError
from turnstream_server.gateway.tinker.json_parts import (
    Int32,
    Int64,
    ModelInput,
    Part,
    Settings,
    read_header,
    read_part,
)
from turnstream_server.models.sampling_params import SamplingParams
from turnstream_server.operations.results import Failure, value_or_failure

_UNSUPPORTED: Final = ("target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n")
"""Fields of which the SDK requires an answer: 0 and null request none."""


class Sampling(NamedTuple):
    """A prompt, int32 (P,), and the parameters of its samples."""

    prompt: NDArray[np.int32]
    params: SamplingParams


class SampleCall(NamedTuple):
    """A call of a sampling session.

    Numbers come in no order; the same number again is the same call. The answer names each of
    `num_samples` sequences. A refused call uses up its number too.
    """

    sampling_session_id: str
    seq_id: int
    num_samples: int
    sampling: Sampling | Failure


class _Header(Part):
    sampling_session_id: StrictStr = Field(min_length=1)
    seq_id: Annotated[StrictInt, Field(ge=0, lt=2**63)]
    num_samples: StrictInt = Field(default=1, ge=1)


class _Params(Settings):
    max_tokens: StrictInt | None = None
    seed: Int64 | None = None
    stop: StrictStr | list[StrictStr] | list[Int32] | None = None
    temperature: StrictFloat = 1.0
    top_k: StrictInt = -1
    top_p: StrictFloat = 1.0


class _Body(Part):
    prompt: ModelInput
    sampling_params: _Params
    prompt_logprobs: StrictBool | None = None
    topk_prompt_logprobs: StrictInt | None = None
    topk_sample_logprobs: StrictInt | None = None


def read_sample_call(body: bytes) -> SampleCall:
    """Return the call in a JSON body; RecordError if it names no session, number, or samples."""
    content, header = read_header(body, _Header)
    return SampleCall(
        sampling_session_id=header.sampling_session_id,
        seq_id=header.seq_id,
        num_samples=header.num_samples,
        sampling=value_or_failure(lambda: _sampling(content, header.num_samples)),
    )


def _sampling(content: dict[str, Any], num_samples: int) -> Sampling:
    for name in _UNSUPPORTED:
        if content.get(name):
            raise BatchingError(f"{name} is {content[name]!r}: it is not supported")
    body = read_part(content, _Body, path=["asample"])
    prompt = np.concatenate([np.empty(0, np.int32), *body.prompt.arrays("prompt")])
    if not len(prompt):
        raise BatchingError("prompt is empty, expected one token or more")
    sent = body.sampling_params
    stop_ids, stop_strings = _stops(sent.stop)
    params = SamplingParams(
        max_tokens=sent.max_tokens,
        temperature=float(sent.temperature),
        top_k=sent.top_k,
        top_p=float(sent.top_p),
        stop_ids=stop_ids,
        stop_strings=stop_strings,
        seed=sent.seed,
        num_samples=num_samples,
        prompt_logprobs=body.prompt_logprobs or False,
        topk_prompt_logprobs=body.topk_prompt_logprobs or 0,
        topk_sample_logprobs=body.topk_sample_logprobs or 0,
    )
    return Sampling(prompt, params)


def _stops(
    stop: str | list[str] | list[int] | None,
) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Return stop tokens and stop strings; None and () are the end tokens of the model.

    >>> _stops(None), _stops([]), _stops("A"), _stops([7])
    ((None, ()), ((), ()), ((), ('A',)), ((7,), ()))
    """
    if stop is None:
        return None, ()
    listed = [stop] if isinstance(stop, str) else stop
    ids = tuple(each for each in listed if isinstance(each, int))
    return ids, tuple(each for each in listed if isinstance(each, str))
