"""Results of training calls and of sampling, in the encoding that the SDK accepts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from turnstream.errors import BatchingError
from turnstream.wire import tinker_pb2 as wire
from turnstream_server.gateway.tinker.encodings import Encoded, accepts_protobuf, as_json, as_proto
from turnstream_server.models.sampling_params import (
    SampledSequence,
    SampleResult,
    StopReason,
    TopkLogprobs,
)
from turnstream_server.operations.results import TrainingOutput

_TYPE: Final = "ArrayRecord"
_REDUCTIONS: Final = ("mean", "sum", "min", "max", "slack", "hash2", "unique")


def encode_output(output: TrainingOutput, *, accept: str) -> Encoded:
    """Return a result in protobuf if the Accept header of its poll names it, else in JSON.

    BatchingError for a metric that the SDK cannot read, or a number that JSON cannot carry.
    """
    _check_metrics(output.metrics)
    return (
        as_proto(_protobuf_of_training(output))
        if accepts_protobuf(accept)
        else as_json(_json_of_training(output))
    )


def _protobuf_of_training(output: TrainingOutput) -> wire.ForwardBackwardOutput:
    arrays = [np.ascontiguousarray(each, "<f4") for each in output.logprobs]
    offsets = [0, *itertools.accumulate(each.nbytes for each in arrays)]
    logprobs = wire.BatchedTensor(
        data=b"".join(each.tobytes() for each in arrays),
        offsets=np.array(offsets, "<i8").tobytes(),
        dtype=wire.DTYPE_FLOAT32,
        trailing_shape=arrays[0].shape[1:] if arrays else (),
    )
    record = wire.ArrayRecord(
        type_tag=_TYPE, fields={"logprobs": logprobs}, num_datums=len(output.logprobs)
    )
    return wire.ForwardBackwardOutput(
        loss_fn_output_type=_TYPE, loss_fn_outputs=[record], metrics=output.metrics
    )


def _json_of_training(output: TrainingOutput) -> dict[str, Any]:
    return {
        "loss_fn_output_type": _TYPE,
        "loss_fn_outputs": ({"logprobs": _tensor(each)} for each in output.logprobs),
        "metrics": output.metrics,
    }


def _tensor(array: NDArray[np.float32]) -> dict[str, Any]:
    return {"data": array.ravel(), "dtype": "float32", "shape": list(array.shape)}


def _check_metrics(metrics: Mapping[str, float]) -> None:
    """Raise BatchingError unless the SDK can reduce each metric over the chunks of a call."""
    if "loss:sum" not in metrics:
        raise BatchingError(f"metrics have no loss:sum, only {', '.join(metrics) or 'none'}")
    for name in metrics:
        if name.partition(":")[2] not in _REDUCTIONS:
            expected = f"<name>:<reduction> with one of {', '.join(_REDUCTIONS)}"
            raise BatchingError(f"metric {name!r}, expected {expected}")


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
    return (
        as_proto(_protobuf_of_sample(result))
        if accepts_protobuf(accept)
        else as_json(_json_of_sample(result))
    )


def _protobuf_of_sample(result: SampleResult) -> wire.SampleResponse:
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


def _json_of_sample(result: SampleResult) -> dict[str, Any]:
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
