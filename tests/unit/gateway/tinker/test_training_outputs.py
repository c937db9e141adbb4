"""Results of training calls; `recorded/output.bin` and `.json` were read by releases of the SDK."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from turnstream.errors import BatchingError
from turnstream.wire import tinker_pb2 as wire
from turnstream_server.gateway.tinker.encodings import JSON, PROTOBUF
from turnstream_server.gateway.tinker.outputs import encode_output
from turnstream_server.operations.results import TrainingOutput

RECORDED = Path(__file__).parent / "recorded"
NEW_ACCEPT = "application/x-protobuf, application/json"
OUTPUT = TrainingOutput(
    logprobs=[np.array([-0.5, -1.25, -2.0], np.float32), np.array([-3.0], np.float32)],
    metrics={"loss:sum": 1.5, "clipped:mean": 0.25},
)


@pytest.mark.parametrize(
    ("accept", "content_type", "name"),
    [(NEW_ACCEPT, PROTOBUF, "output.bin"), ("application/json", JSON, "output.json")],
)
def test_output_has_the_bytes_that_the_sdk_has_read(
    accept: str, content_type: str, name: str
) -> None:
    encoded = encode_output(OUTPUT, accept=accept)

    assert encoded.content_type == content_type
    assert encoded.body == (RECORDED / name).read_bytes()


def test_several_targets_of_a_position_have_a_trailing_shape() -> None:
    logprobs = [np.arange(n * 3, dtype=np.float32).reshape(n, 3) for n in (2, 1)]
    output = TrainingOutput(logprobs=logprobs, metrics={"loss:sum": 0.0})

    message = wire.ForwardBackwardOutput.FromString(encode_output(output, accept=NEW_ACCEPT).body)
    (record,) = message.loss_fn_outputs
    field = record.fields["logprobs"]

    assert (record.num_datums, list(field.trailing_shape)) == (2, [3])
    assert np.frombuffer(field.offsets, "<i8").tolist() == [0, 24, 36]
    joined = np.frombuffer(field.data, "<f4").reshape(-1, 3)
    assert joined.tolist() == np.concatenate(logprobs).tolist()
    as_json = json.loads(encode_output(output, accept=JSON).body)
    assert [each["logprobs"]["shape"] for each in as_json["loss_fn_outputs"]] == [[2, 3], [1, 3]]


def test_json_of_many_values_leaves_the_interpreter_to_other_threads() -> None:
    values = np.random.default_rng(0).normal(size=1 << 19).astype(np.float32)
    output = OUTPUT._replace(logprobs=[values])
    with ThreadPoolExecutor() as threads:
        encoding = threads.submit(encode_output, output, accept=JSON)
        beats = 0
        while not encoding.done():
            time.sleep(0)
            beats += 1

    assert beats > 20  # an encoder that keeps the interpreter lock leaves one or two
    sent = json.loads(encoding.result().body)["loss_fn_outputs"][0]["logprobs"]
    assert sent == {"data": values.tolist(), "dtype": "float32", "shape": [1 << 19]}


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({}, "metrics have no loss:sum, only none"),
        ({"loss:sum": 0.0, "kl": 0.0}, "metric 'kl', expected <name>:<reduction> with one of mean"),
        ({"loss:sum": 0.0, "a:b:sum": 0.0}, "metric 'a:b:sum'"),
        ({"loss:sum": 0.0, "kl:avg": 0.0}, "metric 'kl:avg'"),
    ],
)
def test_metric_that_the_sdk_cannot_read_is_an_error(
    metrics: dict[str, float], message: str
) -> None:
    with pytest.raises(BatchingError, match=message):
        encode_output(OUTPUT._replace(metrics=metrics), accept=NEW_ACCEPT)


def test_infinite_logprob_is_an_error_in_json_alone() -> None:
    output = OUTPUT._replace(logprobs=[np.array([-np.inf], np.float32)])

    with pytest.raises(BatchingError, match="not finite, which JSON cannot carry"):
        encode_output(output, accept=JSON)
    assert encode_output(output, accept=NEW_ACCEPT).content_type == PROTOBUF
