"""Results of sampling, in the encoding that the SDK accepts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from turnstream.wire import tinker_pb2 as wire
from turnstream_server.gateway.tinker.encodings import Encoded, accepts_protobuf, as_json, as_proto
from turnstream_server.models.sampling_params import (
    SampledSequence,
    SampleResult,
    StopReason,
    TopkLogprobs,
)

_EMPTY_LOGPROB: Final = -99999.0
_STOP_REASONS: Final = {
    StopReason.STOP: wire.STOP_REASON_STOP,
    StopReason.LENGTH: wire.STOP_REASON_LENGTH,
}


def encode_sample(result: SampleResult, *, accept: str) -> Encoded:
    """Return a result in protobuf if the Accept header of its poll names it, else in JSON.

    Log-probabilities of the prompt and of the most likely tokens are sent if there are any. JSON
    has none of the most likely sampled tokens.
    """
    return as_proto(_protobuf(result)) if accepts_protobuf(accept) else as_json(_json(result))


def _protobuf(result: SampleResult) -> wire.SampleResponse:
    prompt = result.prompt_logprobs
    topk = result.topk_prompt_logprobs
    return wire.SampleResponse(
        sequences=[_sequence(each) for each in result.sequences],
        prompt_logprobs=None if prompt is None else prompt.astype("<f4").tobytes(),
        topk_prompt_logprobs=None if topk is None else _topk(topk),
    )


def _sequence(sequence: SampledSequence) -> wire.SampledSequence:
    return wire.SampledSequence(
        stop_reason=_STOP_REASONS[sequence.stop_reason],
        tokens=sequence.token_ids.astype("<i4").tobytes(),
        logprobs=sequence.logprobs.astype("<f4").tobytes(),
        topk_sampled_logprobs=None if sequence.topk is None else _topk(sequence.topk),
    )


def _topk(topk: TopkLogprobs) -> wire.TopkLogprobs:
    length, k = topk.token_ids.shape
    is_empty = np.isnan(topk.logprobs)
    return wire.TopkLogprobs(
        token_ids=np.where(is_empty, 0, topk.token_ids).astype("<i4").tobytes(),
        logprobs=np.where(is_empty, _EMPTY_LOGPROB, topk.logprobs).astype("<f4").tobytes(),
        k=k,
        length=length,
    )


def _json(result: SampleResult) -> dict[str, Any]:
    content: dict[str, Any] = {
        "type": "sample",
        "sequences": (
            {
                "stop_reason": str(each.stop_reason),
                "tokens": each.token_ids,
                "logprobs": each.logprobs,
            }
            for each in result.sequences
        ),
    }
    if result.prompt_logprobs is not None:
        values = result.prompt_logprobs.tolist()
        content["prompt_logprobs"] = [None if math.isnan(each) else each for each in values]
    if result.topk_prompt_logprobs is not None:
        content["topk_prompt_logprobs"] = _pairs(result.topk_prompt_logprobs)
    return content


def _pairs(topk: TopkLogprobs) -> Iterator[list[tuple[int, float]] | None]:
    for ids, logprobs in zip(topk.token_ids, topk.logprobs, strict=True):
        is_empty = bool(np.isnan(logprobs).any())
        yield None if is_empty else [*zip(ids.tolist(), logprobs.tolist(), strict=True)]
