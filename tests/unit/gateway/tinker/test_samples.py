"""Sample calls and results; `recorded/sample.bin` and `.json` were read by releases of the SDK."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnstream.errors import RecordError
from turnstream.wire import tinker_pb2 as wire
from turnstream_server.gateway.tinker.encodings import JSON, PROTOBUF
from turnstream_server.gateway.tinker.outputs import encode_sample
from turnstream_server.gateway.tinker.sample_calls import Sampling, read_sample_call
from turnstream_server.models.sampling_params import (
    SampledSequence,
    SampleResult,
    SamplingParams,
    StopReason,
    TopkLogprobs,
)
from turnstream_server.operations.results import Failure

RECORDED = Path(__file__).parent / "recorded"
NEW_ACCEPT = "application/x-protobuf, application/json"
TOPK = TopkLogprobs(
    token_ids=np.array([[0, 0], [6, 2]], np.int32),
    logprobs=np.array([[np.nan, np.nan], [-0.25, -2.0]], np.float32),
)
RESULT = SampleResult(
    sequences=(
        SampledSequence(
            token_ids=np.array([5, 1], np.int32),
            logprobs=np.array([-0.5, -1.25], np.float32),
            stop_reason=StopReason.STOP,
            version_runs=((3, 2),),
        ),
        SampledSequence(
            token_ids=np.array([7], np.int32),
            logprobs=np.array([-2.0], np.float32),
            stop_reason=StopReason.LENGTH,
            version_runs=((3, 1),),
        ),
    ),
    prompt_logprobs=np.array([np.nan, -0.75], np.float32),
    topk_prompt_logprobs=TOPK,
)


def test_call_of_a_new_release_has_all_parameters() -> None:
    call = read_sample_call((RECORDED / "sample-0.38.0.json").read_bytes())
    assert isinstance(call.sampling, Sampling)
    prompt, params = call.sampling

    assert call[:3] == ("S:sample:0", 400_000_000, 2)
    assert (prompt.dtype, prompt.tolist()) == (np.int32, [5, 6, 7])
    assert params == SamplingParams(
        max_tokens=8,
        temperature=0.5,
        top_k=20,
        top_p=0.9,
        stop_ids=(),
        stop_strings=("\n\nUser:",),
        seed=3,
        num_samples=2,
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=1,
    )


def test_fields_that_an_old_release_leaves_out_have_defaults() -> None:
    call = read_sample_call((RECORDED / "sample-0.16.1.json").read_bytes())

    assert call[:3] == ("S:sample:1", 0, 1)
    assert isinstance(call.sampling, Sampling)
    assert call.sampling.params == SamplingParams(max_tokens=4)


def _body(**changes: Any) -> bytes:
    content = json.loads((RECORDED / "sample-0.38.0.json").read_bytes())
    for name, value in changes.items():
        part, _, field = name.rpartition("__")
        (content[part] if part else content)[field] = value
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    ("stop", "expected"),
    [(None, (None, ())), ([], ((), ())), ("A", ((), ("A",))), ([7, 9], ((7, 9), ()))],
)
def test_stop_is_absent_empty_text_or_tokens(stop: Any, expected: Any) -> None:
    sampling = read_sample_call(_body(sampling_params__stop=stop)).sampling

    assert isinstance(sampling, Sampling)
    params = sampling.params
    assert (params.stop_ids, params.stop_strings) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt__chunks": []}, "prompt is empty, expected one token or more"),
        ({"prompt__chunks": [{"type": "image"}]}, "prompt: chunks of type image are not supported"),
        ({"prompt__chunks": [{"tokens": [2**31]}]}, r"prompt\.chunks\[0\]\.tokens\[0\]: .* got 21"),
        ({"sampling_params__temperature": "hot"}, r"sampling_params\.temperature.*, got 'hot'"),
        ({"sampling_params__temperature": -1.0}, "temperature: -1.0 is neither 0 nor from"),
        ({"sampling_params__top_p": 0.0}, "top_p: 0.0 is not above 0"),
        ({"sampling_params__stop": [1, "a"]}, r"sampling_params\.stop.*got"),
        ({"sampling_params__max_tokens": True}, r"sampling_params\.max_tokens: .*got True"),
        (
            {
                "sampling_params__min_p": 0.1,
                "sampling_params__Penalty": 1,
                "sampling_params__n": None,
            },
            r"sampling_params: 'min_p', 'Penalty' is unknown; known: max_tokens, seed, stop",
        ),
        ({"target_prompt_logprobs": [1]}, r"target_prompt_logprobs is \[1\]: it is not supported"),
        ({"prompt_alt_tokens_k": 3}, "prompt_alt_tokens_k is 3: it is not supported"),
        ({"prompt_logprobs_last_n": 4}, "prompt_logprobs_last_n is 4: it is not supported"),
    ],
)
def test_bad_field_is_refused_by_name_and_value(changes: dict[str, Any], message: str) -> None:
    call = read_sample_call(_body(**changes))

    assert isinstance(call.sampling, Failure)
    assert re.search(message, call.sampling.error), call.sampling.error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling_session_id": None}, "the body, sampling_session_id: .* got None"),
        ({"seq_id": -1}, "the body, seq_id: .* got -1"),
        ({"num_samples": 0}, "the body, num_samples: .* got 0"),
    ],
)
def test_body_without_session_or_number_is_unreadable(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecordError, match=message):
        read_sample_call(_body(**changes))


@pytest.mark.parametrize(
    ("accept", "content_type", "name"),
    [(NEW_ACCEPT, PROTOBUF, "sample.bin"), ("application/json", JSON, "sample.json")],
)
def test_result_has_the_bytes_that_the_sdk_has_read(
    accept: str, content_type: str, name: str
) -> None:
    encoded = encode_sample(RESULT, accept=accept)

    assert encoded.content_type == content_type
    assert encoded.body == (RECORDED / name).read_bytes()


def test_values_that_were_not_requested_are_absent() -> None:
    result = SampleResult(sequences=RESULT.sequences)

    message = wire.SampleResponse.FromString(encode_sample(result, accept=NEW_ACCEPT).body)

    assert not message.HasField("prompt_logprobs")
    assert not message.HasField("topk_prompt_logprobs")
    assert not message.sequences[0].HasField("topk_sampled_logprobs")
    assert set(json.loads(encode_sample(result, accept=JSON).body)) == {"type", "sequences"}
