"""Training calls in protobuf, of the SDK from 0.25 on. Dense arrays share the body's memory."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from turnstream.batching.rows.operations import Operation
from turnstream.errors import BatchingError, RecordError
from turnstream.wire import tinker_pb2 as wire
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
        operation=value_or_failure(lambda: _operation(message)),
    )


def _operation(message: wire.ForwardBackwardRequest) -> Operation | ForwardBackwardRun:
    request_id = str(RequestId(message.model_id, message.seq_id))
    data = [_datum(place, datum) for place, datum in enumerate(message.data)]
    settings = _settings(message)
    return make_operation(request_id, data, loss=message.loss_fn, settings=settings)


def _settings(message: wire.ForwardBackwardRequest) -> dict[str, float | str]:
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    return {
        name: each.text if each.WhichOneof("value") == "text" else each.number
        for name, each in message.loss_fn_config_v2.items()
    }


def _datum(place: int, message: wire.Datum) -> RawDatum:
    chunks: list[NDArray[np.int32]] = []
    name = f"datum {place}, model_input"
    for chunk in message.model_input:
        require_tokens(chunk.WhichOneof("kind") or "none", name=name)
        chunks.append(_numbers(name, chunk.encoded_text.tokens, "<i4"))
    inputs = {
        name: _loss_input(f"datum {place}, {name}", each)
        for name, each in message.loss_fn_inputs.items()
    }
    return RawDatum(chunks, inputs)


def _loss_input(name: str, message: wire.Tensor) -> LossInput:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise BatchingError(f"{name}: dtype {message.dtype}, expected 1 (float32) or 2 (int64)")
    shape = tuple(message.shape) or None
    if message.WhichOneof("storage") != "sparse_csr":
        return LossInput(_numbers(name, message.dense, dtype), shape)
    rows = message.sparse_csr
    places = SparseRows(
        _numbers(f"{name}, crow_indices", rows.crow_indices, "<i8"),
        _numbers(f"{name}, col_indices", rows.col_indices, "<i8"),
    )
    return LossInput(_numbers(name, rows.values, dtype), shape, places)


def _numbers(name: str, data: bytes, dtype: str) -> NDArray[Any]:
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise BatchingError(f"{name}: {len(data)} bytes, expected a multiple of {size}")
    return np.frombuffer(data, dtype)
