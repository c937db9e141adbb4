"""The body of a `forward_backward` or `forward`, as one kind of call.

The SDK sends protobuf from 0.25 on, and JSON before. Dense arrays in protobuf share the memory of
the body.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, cast

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, PlainValidator, StrictInt

from turnstream.batching.rows.operations import Operation
from turnstream.errors import BatchingError, RecordError
from turnstream.wire import tinker_pb2 as wire
from turnstream_server.gateway.tinker.encodings import JSON, PROTOBUF, media_type_of
from turnstream_server.gateway.tinker.json_parts import (
    Int64,
    ModelInput,
    Part,
    read_header,
    read_part,
)
from turnstream_server.gateway.tinker.loss_inputs import (
    LossInput,
    RawDatum,
    SparseRows,
    TrainingCall,
    make_operation,
    require_tokens,
)
from turnstream_server.gateway.tinker.message_fields import check_fields
from turnstream_server.operations.contents import ForwardBackwardRun
from turnstream_server.operations.keys import RequestId
from turnstream_server.operations.results import value_or_failure


def read_training_call(body: bytes, *, content_type: str, route: str) -> TrainingCall:
    """Return the call in a body of a route; RecordError if it names no model and no number."""
    read = {PROTOBUF: read_protobuf, JSON: read_json}.get(media_type_of(content_type))
    if read is None:
        raise RecordError(f"Content-Type is {content_type!r}, expected {PROTOBUF} or {JSON}")
    call = read(body, route=route)
    if not call.model_id:
        raise RecordError("model_id is empty, expected the id of a model")
    if call.seq_id < 1:
        raise RecordError(f"seq_id is {call.seq_id}, expected 1 or more")
    return call


_MAX_DATUMS: Final = 4096
"""Datums of one call; the SDK sends up to 1,024."""

_INPUT_OF_ROUTE: Final = {
    "forward_backward": "forward_backward_input",
    "forward": "forward_input",
}


def _number_or_text(value: Any) -> Any:
    """Refuse truth values, which pydantic would convert."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("Input should be a number")  # noqa: TRY004 - pydantic reports ValueError
    return value


def _listed(value: Any) -> list[Any]:
    """Return the same list: pydantic would copy it."""
    if not isinstance(value, list):
        raise ValueError("Input should be a valid list")  # noqa: TRY004 - pydantic reports ValueError
    return cast("list[Any]", value)


_Setting = Annotated[float | str, BeforeValidator(_number_or_text)]


class _Tensor(Part):
    data: Annotated[Any, PlainValidator(_listed)]
    dtype: Literal["float32", "int64"]
    shape: list[Int64] | None = None
    sparse_crow_indices: list[Int64] | None = None
    sparse_col_indices: list[Int64] | None = None


class _Datum(Part):
    model_input: ModelInput
    loss_fn_inputs: dict[str, _Tensor]


class _Input(Part):
    data: list[_Datum] = Field(max_length=_MAX_DATUMS)
    loss_fn: str
    loss_fn_config: dict[str, _Setting] | None = None


class _Header(Part):
    model_id: str
    seq_id: StrictInt


def read_json(body: bytes, *, route: str) -> TrainingCall:
    """Return the call in a body; RecordError if it names no model and no number."""
    content, header = read_header(body, _Header)
    field, request_id = _INPUT_OF_ROUTE[route], str(RequestId(header.model_id, header.seq_id))
    return TrainingCall(
        model_id=header.model_id,
        seq_id=header.seq_id,
        forward_only=route == "forward",
        is_sparse=b'"sparse_crow_indices"' in body,
        operation=value_or_failure(lambda: _json_operation(content.get(field), field, request_id)),
    )


def _json_operation(content: object, field: str, request_id: str) -> Operation | ForwardBackwardRun:
    call = read_part(content, _Input, path=[field])
    data = [_json_datum(place, datum) for place, datum in enumerate(call.data)]
    return make_operation(request_id, data, loss=call.loss_fn, settings=call.loss_fn_config or {})


def _json_datum(place: int, datum: _Datum) -> RawDatum:
    chunks = datum.model_input.arrays(f"datum {place}, model_input")
    inputs = {
        name: _json_loss_input(f"datum {place}, {name}", each)
        for name, each in datum.loss_fn_inputs.items()
    }
    return RawDatum(chunks, inputs)


def _json_loss_input(name: str, tensor: _Tensor) -> LossInput:
    values = _json_numbers(name, tensor.data, tensor.dtype)
    shape = None if tensor.shape is None else tuple(tensor.shape)
    if tensor.sparse_crow_indices is None:
        return LossInput(values, shape)
    places = SparseRows(
        np.array(tensor.sparse_crow_indices, np.int64),
        np.array(tensor.sparse_col_indices or [], np.int64),
    )
    return LossInput(values, shape, places)


def _json_numbers(name: str, data: list[Any], dtype: str) -> NDArray[Any]:
    wanted = int if dtype == "int64" else int | float
    for place, value in enumerate(data):
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise BatchingError(f"{name}: data[{place}] is {value!r}, expected {dtype}")
    try:
        with np.errstate(over="raise"):
            return np.array(data, dtype)
    except (OverflowError, FloatingPointError) as error:
        raise BatchingError(f"{name}: a value does not fit into {dtype}") from error


_DTYPES: Final = {wire.DTYPE_FLOAT32: "<f4", wire.DTYPE_INT64: "<i8"}


def read_protobuf(body: bytes, *, route: str) -> TrainingCall:
    """Return the call in a body; RecordError if it is no such message."""
    check_fields(body, wire.ForwardBackwardRequest.DESCRIPTOR)
    try:
        message = wire.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise RecordError(f"the body is no ForwardBackwardRequest: {error}") from error
    is_sparse = any(
        tensor.WhichOneof("storage") == "sparse_csr"
        for datum in message.data
        for tensor in datum.loss_fn_inputs.values()
    )
    return TrainingCall(
        model_id=message.model_id,
        seq_id=message.seq_id,
        forward_only=message.forward_only or route == "forward",
        is_sparse=is_sparse,
        operation=value_or_failure(lambda: _protobuf_operation(message)),
    )


def _protobuf_operation(message: wire.ForwardBackwardRequest) -> Operation | ForwardBackwardRun:
    request_id = str(RequestId(message.model_id, message.seq_id))
    data = [_protobuf_datum(place, datum) for place, datum in enumerate(message.data)]
    settings = _settings(message)
    return make_operation(request_id, data, loss=message.loss_fn, settings=settings)


def _settings(message: wire.ForwardBackwardRequest) -> dict[str, float | str]:
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    return {
        name: each.text if each.WhichOneof("value") == "text" else each.number
        for name, each in message.loss_fn_config_v2.items()
    }


def _protobuf_datum(place: int, message: wire.Datum) -> RawDatum:
    chunks: list[NDArray[np.int32]] = []
    name = f"datum {place}, model_input"
    for chunk in message.model_input:
        require_tokens(chunk.WhichOneof("kind") or "none", name=name)
        chunks.append(_protobuf_numbers(name, chunk.encoded_text.tokens, "<i4"))
    inputs = {
        name: _protobuf_loss_input(f"datum {place}, {name}", each)
        for name, each in message.loss_fn_inputs.items()
    }
    return RawDatum(chunks, inputs)


def _protobuf_loss_input(name: str, message: wire.Tensor) -> LossInput:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise BatchingError(f"{name}: dtype {message.dtype}, expected 1 (float32) or 2 (int64)")
    shape = tuple(message.shape) or None
    if message.WhichOneof("storage") != "sparse_csr":
        return LossInput(_protobuf_numbers(name, message.dense, dtype), shape)
    rows = message.sparse_csr
    places = SparseRows(
        _protobuf_numbers(f"{name}, crow_indices", rows.crow_indices, "<i8"),
        _protobuf_numbers(f"{name}, col_indices", rows.col_indices, "<i8"),
    )
    return LossInput(_protobuf_numbers(name, rows.values, dtype), shape, places)


def _protobuf_numbers(name: str, data: bytes, dtype: str) -> NDArray[Any]:
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise BatchingError(f"{name}: {len(data)} bytes, expected a multiple of {size}")
    return np.frombuffer(data, dtype)
