"""Training calls in both encodings; `recorded/` has bodies of real releases of the SDK."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstream.batching.rows.operations import Datum, Operation
from turnstream.errors import RecordError
from turnstream.wire import tinker_pb2 as wire
from turnstream_server.gateway.tinker.encodings import JSON, PROTOBUF
from turnstream_server.gateway.tinker.loss_inputs import TrainingCall
from turnstream_server.gateway.tinker.message_fields import MAX_FIELDS
from turnstream_server.gateway.tinker.training_calls import read_training_call
from turnstream_server.operations.results import Failure

RECORDED = Path(__file__).parent / "recorded"
FLOAT_INPUTS = ("weights", "logprobs", "advantages", "sequence_ratio_mask")
DTYPES = {"float32": wire.DTYPE_FLOAT32, "int64": wire.DTYPE_INT64}


def test_bodies_of_old_and_new_releases_are_one_operation() -> None:
    for name, content_type in (("ppo-0.38.0.bin", PROTOBUF), ("ppo-0.16.1.json", JSON)):
        call = _read(name, content_type)
        operation = call.operation
        first, second = operation.data

        assert (call.model_id, call.seq_id, call.forward_only) == ("S:train:0", 3, False)
        assert (operation.request_id, operation.loss) == ("S:train:0:3", "ppo")
        assert operation.settings == {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
        _assert_array(first.model_input, [5, 6, 7], np.int32)
        _assert_array(first.target_tokens, [6, 7, 8], np.int64)
        _assert_array(first.logprobs, [-1.5, -0.25, -2.0], np.float32)
        _assert_array(first.advantages, [0.0, 1.0, -1.0], np.float32)
        _assert_array(second.model_input, [9], np.int32)
        assert first.weights is None


def test_sparse_weights_of_several_targets_are_dense_arrays() -> None:
    call = _read("cross_entropy-0.38.0.bin", PROTOBUF)

    (datum,) = call.operation.data

    assert call.forward_only
    _assert_array(datum.target_tokens, [[1, 2, 3], [4, 5, 6]], np.int64)
    _assert_array(datum.weights, [[0, 0, 1], [0.5, 0, 0]], np.float32)


def test_forward_route_of_old_releases_is_forward_only() -> None:
    call = _read("forward-0.16.1.json", JSON, route="forward")

    assert call.forward_only
    assert call.operation.loss == "cross_entropy"


def test_dense_arrays_of_protobuf_share_the_memory_of_the_message() -> None:
    (first, _) = _read("ppo-0.38.0.bin", PROTOBUF).operation.data

    assert first.advantages is not None
    assert isinstance(first.advantages.base, np.ndarray | bytes)
    assert not first.advantages.flags.writeable


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(st.data(), LENGTHS)
def test_both_encodings_carry_equal_operations(data: st.DataObject, lengths: list[int]) -> None:
    tokens = st.integers(0, 2**31 - 1)
    datums = [
        {
            "tokens": data.draw(st.lists(tokens, min_size=length, max_size=length)),
            "target_tokens": data.draw(st.lists(tokens, min_size=length, max_size=length)),
            "logprobs": data.draw(st.lists(FLOATS, min_size=length, max_size=length)),
            "advantages": data.draw(st.lists(FLOATS, min_size=length, max_size=length)),
        }
        for length in lengths
    ]
    beta = data.draw(st.floats(0, 10))

    calls = [
        read_training_call(body, content_type=kind, route="forward_backward")
        for body, kind in (
            (_protobuf(datums, loss="dro", beta=beta), PROTOBUF),
            (_json(datums, loss="dro", beta=beta), f"{JSON}; charset=utf-8"),
        )
    ]

    one, other = (call.operation for call in calls)
    assert isinstance(one, Operation)
    assert isinstance(other, Operation)
    assert one.settings == other.settings == {"beta": beta}
    assert [*map(_values, one.data)] == [*map(_values, other.data)]
    assert [each.model_input.tolist() for each in one.data] == [each["tokens"] for each in datums]


GOOD: dict[str, Any] = {
    "tokens": [1, 2],
    "target_tokens": [2, 3],
    "logprobs": [-1.0, -1.0],
    "advantages": [1.0, 1.0],
}


@pytest.mark.parametrize(
    ("change", "loss", "message"),
    [
        ({"advantages": [1.0]}, "ppo", r"datum 1: advantages of shape \(1,\) for target_tokens"),
        ({"target_tokens": [2]}, "ppo", r"datum 1: target_tokens of shape \(1,\) for 2 tokens of"),
        ({"tokens": []}, "ppo", "datum 1: model_input is empty"),
        ({"logprobs": None}, "ppo", "datum 1: logprobs is missing, which ppo needs"),
        ({"target_tokens": None}, "ppo", "datum 1: loss input target_tokens is missing"),
        ({"reward": [1.0, 1.0]}, "ppo", "datum 1: loss input 'reward' is unknown; known: target_"),
        ({"target_tokens": [2.0, 3.0]}, "ppo", "target_tokens: dtype float32, expected int64"),
        ({}, "reinforce", "loss 'reinforce' is not one of cross_entropy, importance_sampling"),
        ({}, "stable_reinforce", "loss_fn 'stable_reinforce' is not supported; known: cross_entr"),
        ({}, "custom", "loss_fn 'custom' is not supported"),
        ({"settings": {"clip_range": 0.2}}, "ppo", "'clip_range' is unknown; ppo has: clip_low"),
        ({"settings": {"clip_low_threshold": "low"}}, "ppo", "text 'low'"),
    ],
)
def test_bad_datums_and_settings_are_refused_by_name_and_value(
    change: dict[str, Any], loss: str, message: str
) -> None:
    changed = {name: each for name, each in {**GOOD, **change}.items() if each is not None}
    settings = changed.pop("settings", {})

    for encode, kind in ((_protobuf, PROTOBUF), (_json, JSON)):
        body = encode([GOOD, changed], loss=loss, **settings)
        call = read_training_call(body, content_type=kind, route="forward_backward")
        assert (call.model_id, call.seq_id) == ("S:train:0", 7)
        assert_refused(call, message)


def assert_refused(call: TrainingCall, message: str) -> None:
    assert isinstance(call.operation, Failure)
    assert call.operation.category == "user"
    assert re.search(message, call.operation.error), call.operation.error


def _damaged(change: Callable[[wire.ForwardBackwardRequest], Any]) -> bytes:
    message = wire.ForwardBackwardRequest.FromString((RECORDED / "ppo-0.38.0.bin").read_bytes())
    change(message)
    return message.SerializeToString()


def _sparse(rows: list[int], columns: list[int]) -> bytes:
    def change(message: wire.ForwardBackwardRequest) -> None:
        weights = message.data[0].loss_fn_inputs["weights"]
        weights.dtype = wire.DTYPE_FLOAT32
        weights.shape.extend([2, 2])
        weights.sparse_csr.values = np.ones(2, "<f4").tobytes()
        weights.sparse_csr.crow_indices = np.array(rows, "<i8").tobytes()
        weights.sparse_csr.col_indices = np.array(columns, "<i8").tobytes()

    return _damaged(change)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            _damaged(lambda m: setattr(m.data[1].loss_fn_inputs["logprobs"], "dense", b"12345")),
            "datum 1, logprobs: 5 bytes, expected a multiple of 4",
        ),
        (
            _damaged(lambda m: setattr(m.data[0].loss_fn_inputs["logprobs"], "dtype", 4)),
            "datum 0, logprobs: dtype 4, expected 1",
        ),
        (
            _damaged(lambda m: m.data[0].loss_fn_inputs["logprobs"].shape.append(2)),
            r"datum 0, logprobs: 3 values for shape \(3, 2\)",
        ),
        (
            _damaged(lambda m: m.data[0].loss_fn_inputs["logprobs"].shape.extend([0, 2**62])),
            r"datum 0, logprobs: shape \(3, 0, \d+\), expected at most 2097152 values",
        ),
        (_damaged(lambda m: m.data[0].model_input.add().image.SetInParent()), "chunks of type ima"),
        (
            _damaged(lambda m: m.data[1].model_input.add().dmel.SetInParent()),
            "chunks of type audio",
        ),
        (_damaged(lambda m: m.ClearField("data")), "operation 'S:train:0:3' of 0 data"),
        *(
            (_sparse(rows, columns), r"datum 0, weights: indices of sparse rows do not fit")
            for rows, columns in (
                ([0, 1], [0, 0]),
                ([1, 1, 2], [0, 0]),
                ([0, 3, 2], [0, 0]),
                ([0, 1, 2], [0, 2]),
                ([0, 1, 2], [-1, 0]),
                ([0, 1, 3], [0, 0]),
            )
        ),
    ],
)
def test_damaged_protobuf_datums_are_refused(body: bytes, message: str) -> None:
    call = read_training_call(body, content_type=PROTOBUF, route="forward_backward")

    assert_refused(call, message)


def test_shapes_are_limited_before_arrays_are_made() -> None:
    named = dict.fromkeys(FLOAT_INPUTS, wire.DTYPE_FLOAT32) | {"target_tokens": wire.DTYPE_INT64}
    for name, dtype in named.items():
        for shape in ((2, 1 << 20), (3, 5_000_000), (1 << 11, 1 << 11)):
            message = wire.ForwardBackwardRequest(model_id="S:train:0", seq_id=1)
            rows = wire.SparseRows(crow_indices=bytes(8 * (shape[0] + 1)))
            tensor = wire.Tensor(sparse_csr=rows, dtype=dtype, shape=shape)
            message.data.extend([wire.Datum(loss_fn_inputs={name: tensor})] * 2)
            body = message.SerializeToString()

            tracemalloc.start()
            call = read_training_call(body, content_type=PROTOBUF, route="forward_backward")
            _, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert call.is_sparse
            assert_refused(call, rf"{name}: \d+ values .* at most 2097152")
            assert peak_bytes < 1 << 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "text"}, r"forward_backward_input, data: .* list, got 'text'"),
        ({"data": [{}]}, r"forward_backward_input, data\[0\]\.model_input: field required"),
        ({"loss_fn": 3}, "forward_backward_input, loss_fn: .* string, got 3"),
        ({"loss_fn_config": {"beta": True}}, r"loss_fn_config\.beta: .* number, got True"),
        (("float32", "1"), r"datum 0, weights: data\[1\] is '1', expected float32"),
        (("float32", True), r"datum 0, weights: data\[1\] is True, expected float32"),
        (("int64", 1.5), r"datum 0, weights: data\[1\] is 1.5, expected int64"),
        (("int64", 2**63), "datum 0, weights: a value does not fit into int64"),
    ],
)
def test_malformed_json_input_is_refused_by_path_and_value(change: Any, message: str) -> None:
    body = json.loads(_json([GOOD], loss="ppo"))
    sent = body["forward_backward_input"]
    if isinstance(change, dict):
        sent |= change
    else:
        weights = {"data": [1, change[1]], "dtype": change[0]}
        sent["data"][0]["loss_fn_inputs"]["weights"] = weights

    call = read_training_call(
        json.dumps(body).encode(), content_type=JSON, route="forward_backward"
    )

    assert_refused(call, message)


@pytest.mark.parametrize(
    ("body", "content_type", "message"),
    [
        (b"\xff", PROTOBUF, "the body is no ForwardBackwardRequest"),
        (b"", PROTOBUF, "model_id is empty"),
        (_damaged(lambda m: m.ClearField("seq_id")), PROTOBUF, "seq_id is 0, expected 1 or more"),
        (b"{", JSON, "the body is no JSON"),
        (b"[]", JSON, r"the body: .* got \[\]"),
        (b'{"seq_id": 1}', JSON, "model_id: field required"),
        (b'{"model_id": "m", "seq_id": "1"}', JSON, "seq_id: .* integer, got '1'"),
        (b"", "text/plain", "Content-Type is 'text/plain', expected application/x-protobuf or"),
    ],
)
def test_body_without_model_or_number_is_unreadable(
    body: bytes, content_type: str, message: str
) -> None:
    with pytest.raises(RecordError, match=message):
        read_training_call(body, content_type=content_type, route="forward_backward")


def _read(name: str, content_type: str, *, route: str = "forward_backward") -> Any:
    body = (RECORDED / name).read_bytes()
    return read_training_call(body, content_type=content_type, route=route)


def _protobuf(datums: list[dict[str, Any]], *, loss: str, **settings: Any) -> bytes:
    message = wire.ForwardBackwardRequest(model_id="S:train:0", seq_id=7, loss_fn=loss)
    for name, value in settings.items():
        if isinstance(value, str):
            message.loss_fn_config_v2[name].text = value
        else:
            message.loss_fn_config_v2[name].number = value
    for datum in datums:
        added = message.data.add()
        added.model_input.add().encoded_text.tokens = np.array(datum["tokens"], "<i4").tobytes()
        for name, values in _inputs(datum).items():
            dtype = _dtype(values)
            added.loss_fn_inputs[name].dense = np.array(values, dtype).tobytes()
            added.loss_fn_inputs[name].dtype = DTYPES[dtype]
            added.loss_fn_inputs[name].shape.append(len(values))
    return message.SerializeToString()


def _json(datums: list[dict[str, Any]], *, loss: str, **settings: Any) -> bytes:
    data = [
        {
            "model_input": {"chunks": [{"tokens": datum["tokens"], "type": "encoded_text"}]},
            "loss_fn_inputs": {
                name: {"data": values, "dtype": _dtype(values)}
                for name, values in _inputs(datum).items()
            },
        }
        for datum in datums
    ]
    call = {"data": data, "loss_fn": loss, "loss_fn_config": settings or None}
    return json.dumps(
        {"model_id": "S:train:0", "seq_id": 7, "forward_backward_input": call}
    ).encode()


def _inputs(datum: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: values for name, values in datum.items() if name != "tokens"}


def _dtype(values: list[Any]) -> str:
    return "int64" if all(isinstance(each, int) for each in values) else "float32"


def _values(datum: Datum) -> list[Any]:
    assert datum.logprobs is not None
    assert datum.advantages is not None
    arrays = (datum.model_input, datum.target_tokens, datum.logprobs, datum.advantages)
    return [each.tolist() for each in arrays]


def _assert_array(actual: Any, expected: list[Any], dtype: type) -> None:
    assert actual.dtype == dtype
    assert actual.tolist() == expected


def test_messages_of_many_small_parts_are_refused_before_they_are_built() -> None:
    datums = b"\x1a\x00" * (MAX_FIELDS + 1)  # each is two bytes, and a message in memory
    shape = _damaged(lambda m: m.data[0].loss_fn_inputs["weights"].shape.extend([1] * MAX_FIELDS))
    cut = (RECORDED / "ppo-0.38.0.bin").read_bytes()[:-3]

    for body, kind, message in (
        (datums, PROTOBUF, f"more than {MAX_FIELDS} fields"),
        (shape, PROTOBUF, f"more than {MAX_FIELDS} fields"),
        (cut, PROTOBUF, "is no ForwardBackwardRequest"),
        (b"\x10" + b"\xff" * (32 << 20), PROTOBUF, "has no end"),  # one number: seconds, or hours
    ):
        with pytest.raises(RecordError, match=message):
            read_training_call(body, content_type=kind, route="forward_backward")
