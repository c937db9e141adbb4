"""Training calls in JSON, of the SDK before 0.25."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, PlainValidator, StrictInt

from turnstream.batching.rows.operations import Operation
from turnstream.errors import BatchingError
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
)
from turnstream_server.operations.contents import ForwardBackwardRun
from turnstream_server.operations.keys import RequestId
from turnstream_server.operations.results import value_or_failure

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
        operation=value_or_failure(lambda: _operation(content.get(field), field, request_id)),
    )


def _operation(content: object, field: str, request_id: str) -> Operation | ForwardBackwardRun:
    call = read_part(content, _Input, path=[field])
    data = [_datum(place, datum) for place, datum in enumerate(call.data)]
    return make_operation(request_id, data, loss=call.loss_fn, settings=call.loss_fn_config or {})


def _datum(place: int, datum: _Datum) -> RawDatum:
    chunks = datum.model_input.arrays(f"datum {place}, model_input")
    inputs = {
        name: _loss_input(f"datum {place}, {name}", each)
        for name, each in datum.loss_fn_inputs.items()
    }
    return RawDatum(chunks, inputs)


def _loss_input(name: str, tensor: _Tensor) -> LossInput:
    values = _numbers(name, tensor.data, tensor.dtype)
    shape = None if tensor.shape is None else tuple(tensor.shape)
    if tensor.sparse_crow_indices is None:
        return LossInput(values, shape)
    places = SparseRows(
        np.array(tensor.sparse_crow_indices, np.int64),
        np.array(tensor.sparse_col_indices or [], np.int64),
    )
    return LossInput(values, shape, places)


def _numbers(name: str, data: list[Any], dtype: str) -> NDArray[Any]:
    wanted = int if dtype == "int64" else int | float
    for place, value in enumerate(data):
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise BatchingError(f"{name}: data[{place}] is {value!r}, expected {dtype}")
    try:
        with np.errstate(over="raise"):
            return np.array(data, dtype)
    except (OverflowError, FloatingPointError) as error:
        raise BatchingError(f"{name}: a value does not fit into {dtype}") from error
