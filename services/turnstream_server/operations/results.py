"""Results of operations and samples, and their stored bytes.

The first byte is the kind: `E` a failure, `J` an answer in JSON, `T` a training output, `S` a
sample. A result that was dropped is the mark `DROPPED`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from turnstream.errors import BatchingError
from turnstream_server.models.sampling_params import (
    SampledSequence,
    SampleResult,
    StopReason,
    TopkLogprobs,
)
from turnstream_server.operations.packing import pack, unpack

Category = Literal["user", "server", "unknown"]

DROPPED: Final = b"G"
"""The stored bytes of a result that was dropped; see `kept_results.py`."""

_FAILED: Final = b"E"
_TEXT_MARK: Final = "\N{REPLACEMENT CHARACTER}"

_Value = TypeVar("_Value")


class Failure(NamedTuple):
    """A call that had no effect.

    Attributes:
        error: the failure and its reason.
        category: "user" if the caller can correct it.
    """

    error: str
    category: Category


class Answer(NamedTuple):
    """The result of a call in JSON; no key is `error`, which would mean a failure."""

    content: Mapping[str, Any]


class TrainingOutput(NamedTuple):
    """Result of a training call.

    Attributes:
        logprobs: values for the targets of each datum, float32 (N,) or (N, K), before any update.
        metrics: by `<name>:<reduction>`; "loss:sum" is one of them.
    """

    logprobs: Sequence[NDArray[np.float32]]
    metrics: Mapping[str, float]


Result = Failure | Answer | TrainingOutput | SampleResult


def encode_result(result: Result) -> bytes:
    """Return the stored bytes of a result."""
    if isinstance(result, Failure):
        return _FAILED + json.dumps(result._asdict()).encode()
    if isinstance(result, Answer):
        return b"J" + json.dumps(dict(result.content)).encode()
    if isinstance(result, TrainingOutput):
        return b"T" + pack({"metrics": dict(result.metrics)}, result.logprobs)
    return b"S" + _pack_sample(result)


def decode_result(data: bytes) -> Result:
    """Return the result of `encode_result`; its arrays are views."""
    kind, content = data[:1], memoryview(data)[1:]
    if kind == _FAILED:
        return Failure(**json.loads(bytes(content)))
    if kind == b"J":
        return Answer(json.loads(bytes(content)))
    if kind == b"T":
        header, arrays = unpack(content)
        return TrainingOutput(arrays, header["metrics"])
    return _unpack_sample(content)


def value_or_failure(make: Callable[[], _Value]) -> _Value | Failure:
    """Return a value, or the failure of a BatchingError, which the caller can correct."""
    try:
        return make()
    except BatchingError as error:
        return Failure(str(error), "user")


def failure_around(error: str, category: Category, *, mark: str) -> tuple[bytes, bytes]:
    """Return the bytes of a failure before and after a mark in its text, for a script."""
    data = encode_result(Failure(error.replace(mark, _TEXT_MARK), category))
    before, _, after = data.partition(json.dumps(_TEXT_MARK)[1:-1].encode())
    return before, after


def _pack_sample(result: SampleResult) -> bytes:
    arrays: list[NDArray[Any]] = []
    header = {
        "prompt_version": result.prompt_version,
        "has_prompt_logprobs": result.prompt_logprobs is not None,
        "has_topk": result.topk_prompt_logprobs is not None,
        "sequences": [
            [str(each.stop_reason), each.version_runs, each.text, each.topk is not None]
            for each in result.sequences
        ],
    }
    if result.prompt_logprobs is not None:
        arrays.append(result.prompt_logprobs)
    arrays += _topk_arrays(result.topk_prompt_logprobs)
    for each in result.sequences:
        arrays += [each.token_ids, each.logprobs, *_topk_arrays(each.topk)]
    return pack(header, arrays)


def _topk_arrays(topk: TopkLogprobs | None) -> list[NDArray[Any]]:
    return [] if topk is None else [topk.token_ids, topk.logprobs]


def _unpack_sample(data: memoryview) -> SampleResult:
    header, arrays = unpack(data)
    rest = iter(arrays)
    prompt_logprobs = next(rest) if header["has_prompt_logprobs"] else None
    topk_prompt = TopkLogprobs(next(rest), next(rest)) if header["has_topk"] else None
    sequences = [
        SampledSequence(
            token_ids=next(rest),
            logprobs=next(rest),
            stop_reason=StopReason(stop_reason),
            version_runs=tuple((version, count) for version, count in runs),
            text=text,
            topk=TopkLogprobs(next(rest), next(rest)) if has_topk else None,
        )
        for stop_reason, runs, text, has_topk in header["sequences"]
    ]
    return SampleResult(
        sequences=tuple(sequences),
        prompt_logprobs=prompt_logprobs,
        topk_prompt_logprobs=topk_prompt,
        prompt_version=header["prompt_version"],
    )
