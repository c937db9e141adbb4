"""Results of operations and samples: their stored bytes, and the time for which they are kept.

The first byte is the kind: `E` a failure, `J` an answer in JSON, `T` a training output, `S` a
sample. A large result is dropped once it was fetched, or after a time without a fetch. It leaves
the mark `DROPPED`, so that its request stays finished and never runs again. Results of LARGE_BYTES
or fewer stay until their session ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast

import numpy as np
import redis
import redis.asyncio
from numpy.typing import NDArray

from turnstream.errors import BatchingError
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import Command, Script, run_command, run_command_async
from turnstream_server.models.sampling_params import (
    SampledSequence,
    SampleResult,
    StopReason,
    TopkLogprobs,
)
from turnstream_server.operations.keys import (
    RESULTS,
    RequestId,
    model_keys,
    parse_request_id,
    sampler_keys,
)
from turnstream_server.operations.operation_records import pack, unpack

Category = Literal["user", "server", "unknown"]

DROPPED: Final = b"G"
"""The stored bytes of a result that was dropped."""

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


UNFETCHED_S: Final = 3600.0
"""Seconds for which a result without a fetch is kept."""

FETCHED_S: Final = 120.0
"""Seconds for which a result is kept after its first fetch: the answer may be lost."""

LARGE_BYTES: Final = 1 << 10

_MOST: Final = 1_000
"""Results of one read."""

_KEEP: Final = Script("keep_results", "turnstream_server.operations")
_DROP: Final = Script("drop_result", "turnstream_server.operations")


def keep_unfetched(client: redis.Redis, requests: Iterable[tuple[RequestId, bytes]]) -> None:
    """Keep results for UNFETCHED_S from now on; called before they are written."""
    large = [request for request, data in requests if len(data) > LARGE_BYTES]
    if large:
        run_command(client, _kept(UNFETCHED_S, large, keeps_earlier=False))


async def keep_fetched(client: redis.asyncio.Redis, request_id: RequestId, data: bytes) -> None:
    """Keep a result for FETCHED_S after its first fetch."""
    if len(data) > LARGE_BYTES:
        await run_command_async(client, _kept(FETCHED_S, [request_id], keeps_earlier=True))


async def drop_due(client: redis.asyncio.Redis) -> int:
    """Drop the results whose time has expired; return their number."""
    num_dropped = 0
    while found := await _due(client):
        for name in found:
            request_id = parse_request_id(name.decode())
            of_target = sampler_keys if request_id.is_sample else model_keys
            key = of_target(request_id.target).results
            command = _DROP([key], request_id.number, DROPPED)
            num_dropped += await run_command_async(client, command)
        with translating():
            await client.zrem(RESULTS, *found)
    return num_dropped


async def _due(client: redis.asyncio.Redis) -> list[bytes]:
    with translating():
        seconds, _ = cast("tuple[int, int]", await client.time())
        now_ms = seconds * 1000
        return cast(Any, await client.zrangebyscore(RESULTS, 0, now_ms, start=0, num=_MOST))


def _kept(seconds: float, requests: Iterable[RequestId], *, keeps_earlier: bool) -> Command:
    return _KEEP([RESULTS], round(seconds * 1000), int(keeps_earlier), *map(str, requests))
