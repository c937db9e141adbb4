"""Bytes of operations and results: read back exactly, and equal for equal values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from testkit import assert_same
from turnstream.batching.rows.operations import Datum, Operation
from turnstream_server.models.sampling_params import (
    SampledSequence,
    SampleResult,
    StopReason,
    TopkLogprobs,
)
from turnstream_server.operations.operation_records import (
    decode_operation,
    encode_operation,
    pack,
    unpack,
)
from turnstream_server.operations.results import (
    Answer,
    Failure,
    Result,
    TrainingOutput,
    decode_result,
    encode_result,
    failure_around,
)

_FLOATS = ("weights", "logprobs", "advantages", "sequence_ratio_mask")


def _floats(*shape: int) -> st.SearchStrategy[NDArray[np.float32]]:
    return arrays.arrays(np.float32, shape, elements=st.floats(width=32))


def _ids(dtype: type[np.integer[Any]], *shape: int) -> st.SearchStrategy[NDArray[Any]]:
    return arrays.arrays(dtype, shape, elements=st.integers(0, 2**31 - 1))


@st.composite
def datums(draw: st.DrawFn, num_targets: int) -> Datum:
    """A datum with any mix of optional columns; `num_targets` 0 stands for one dimension."""
    length = draw(st.integers(0, 4))
    shape = (length, num_targets) if num_targets else (length,)
    values: dict[str, Any] = {
        "model_input": draw(_ids(np.int32, length)),
        "target_tokens": draw(_ids(np.int64, *shape)),
    }
    for name in draw(st.sets(st.sampled_from(_FLOATS))):
        values[name] = draw(_floats(*(shape if name == "weights" else (length,))))
    return Datum(**values)


@st.composite
def operations(draw: st.DrawFn) -> Operation:
    """An operation, also one that a check would refuse."""
    num_targets = draw(st.integers(0, 3))
    return Operation(
        request_id="S:train:0:7",
        loss=draw(st.sampled_from(["cross_entropy", "ppo", "gspo"])),
        data=draw(st.lists(datums(num_targets), min_size=1, max_size=4)),
        settings=draw(st.dictionaries(st.text(max_size=4), st.floats(), max_size=2)),
    )


def _ordered(operation: Operation) -> Operation:
    settings = dict(sorted(operation.settings.items()))
    return Operation(
        request_id=operation.request_id,
        loss=operation.loss,
        data=operation.data,
        settings=settings,
    )


@given(operations())
def test_operation_is_read_back(operation: Operation) -> None:

    found = decode_operation(encode_operation(operation), request_id=operation.request_id)

    assert_same(found, _ordered(operation))


@given(operations())
def test_equal_operations_have_equal_bytes(operation: Operation) -> None:
    data = encode_operation(operation)
    settings = {name: operation.settings[name] for name in reversed([*operation.settings])}
    strided = [_strided(each) for each in operation.data]
    equal = Operation(request_id="other", loss=operation.loss, data=strided, settings=settings)

    assert encode_operation(equal) == data
    assert encode_operation(decode_operation(data, request_id="x")) == data


def _strided(datum: Datum) -> Datum:
    """Return an equal datum whose arrays are not contiguous."""
    values: dict[str, Any] = {name: getattr(datum, name) for name in Datum.__dataclass_fields__}
    strided: dict[str, Any] = {
        name: None if value is None else np.repeat(value, 2, axis=0)[::2]
        for name, value in values.items()
    }
    return Datum(**strided)


def test_arrays_of_an_operation_are_views_that_cannot_be_written() -> None:
    datum = Datum(
        model_input=np.arange(3, dtype=np.int32),
        target_tokens=np.arange(6, dtype=np.int64).reshape(3, 2),
        weights=np.ones((3, 2), np.float32),
    )
    data = encode_operation(Operation(request_id="r", loss="cross_entropy", data=[datum, datum]))

    found = decode_operation(data, request_id="r").data

    buffer = np.frombuffer(data, np.uint8)
    for each in found:
        for values in (each.model_input, each.target_tokens, each.weights):
            assert values is not None
            assert np.shares_memory(values, buffer)
            assert not values.flags.writeable


_any_array = st.sampled_from(["<i4", "<i8", "<f4", "|u1", ">i4"]).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_side=0, max_dims=3))
)


@given(st.dictionaries(st.text(max_size=3), st.floats() | st.none()), st.lists(_any_array))
def test_packed_block_is_read_back(header: dict[str, Any], values: list[NDArray[Any]]) -> None:

    found = unpack(memoryview(pack(header, values)))

    assert_same(found.header, dict(sorted(header.items())))
    expected = [each.astype(each.dtype.newbyteorder("<")) for each in values]
    assert_same(found.arrays, expected)


def _topk(*shape: int) -> st.SearchStrategy[TopkLogprobs]:
    return st.builds(TopkLogprobs, _ids(np.int32, *shape), _floats(*shape))


@st.composite
def sequences(draw: st.DrawFn) -> SampledSequence:
    """A sampled sequence, also an empty one."""
    length = draw(st.integers(0, 3))
    return SampledSequence(
        token_ids=draw(_ids(np.int32, length)),
        logprobs=draw(_floats(length)),
        stop_reason=draw(st.sampled_from(StopReason)),
        version_runs=tuple(draw(st.lists(st.tuples(st.integers(-1, 9), st.integers(0, 9))))),
        text=draw(st.none() | st.text(max_size=3)),
        topk=draw(st.none() | _topk(length, 2)),
    )


samples = st.builds(
    SampleResult,
    sequences=st.lists(sequences(), max_size=3).map(tuple),
    prompt_logprobs=st.none() | _floats(4),
    topk_prompt_logprobs=st.none() | _topk(4, 2),
    prompt_version=st.integers(-1, 9),
)
outputs = st.builds(
    TrainingOutput,
    st.lists(
        st.tuples(st.integers(0, 3)).flatmap(lambda shape: _floats(*shape))
        | st.tuples(st.integers(0, 3), st.integers(1, 2)).flatmap(lambda shape: _floats(*shape)),
        max_size=3,
    ),
    st.dictionaries(st.text(max_size=3), st.floats(), max_size=3),
)
failures = st.builds(Failure, st.text(), st.sampled_from(["user", "server", "unknown"]))
answers = st.builds(
    Answer, st.dictionaries(st.text(max_size=3), st.floats() | st.none() | st.text(max_size=3))
)


@given(samples | outputs | failures | answers)
@example(TrainingOutput([], {"loss:sum": math.nan, "kl:max": -math.inf}))
def test_result_is_read_back(result: Result) -> None:

    found = decode_result(encode_result(result))

    assert type(found) is type(result)
    if isinstance(result, TrainingOutput):
        result = TrainingOutput(result.logprobs, dict(sorted(result.metrics.items())))
    assert_same(found, result)


def test_first_byte_of_a_result_tells_failures_from_others() -> None:
    others = [Answer({}), TrainingOutput([], {}), SampleResult(sequences=())]

    assert encode_result(Failure("", "user"))[:1] == b"E"
    assert b"E" not in {encode_result(each)[:1] for each in others}


@pytest.mark.parametrize("number", [0, 7, 2**40])
def test_script_writes_a_failure_around_a_number(number: int) -> None:
    before, after = failure_around('"é": MARK is missing', "server", mark="MARK")

    failure = decode_result(before + b"%d" % number + after)

    assert failure == Failure(f'"é": {number} is missing', "server")
