"""Training calls in JSON, of the SDK before 0.25."""

from __future__ import annotations

import functools
from typing import Annotated, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, ValidationError
from pydantic_core import from_json

from turnstream.batching.rows.operations import Operation
from turnstream.errors import BatchingError, RecordError
from turnstream_server.gateway.tinker.header import CallHeader, DecodeOperation
from turnstream_server.gateway.tinker.loss_inputs import (
    LossInput,
    RawDatum,
    SparseRows,
    make_operation,
    require_tokens,
)

_INPUT_OF_ROUTE: Final = {
    "forward_backward": "forward_backward_input",
    "forward": "forward_input",
}

_LONGEST_VALUE: Final = 80
"""Characters of a value that an error quotes."""


def _number_or_text(value: Any) -> Any:
    """Refuse truth values, which pydantic would convert."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("Input should be a number")  # noqa: TRY004 - pydantic reports ValueError
    return value


_Setting = Annotated[float | str, BeforeValidator(_number_or_text)]
_Int32 = Annotated[StrictInt, Field(ge=-(2**31), lt=2**31)]
_Int64 = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]


class _Part(BaseModel):
    """Fields that a newer SDK adds are ignored."""

    model_config = ConfigDict(extra="ignore")


class _Chunk(_Part):
    type: str | None = None
    tokens: list[_Int32] | None = None


class _ModelInput(_Part):
    chunks: list[_Chunk]


class _Tensor(_Part):
    data: list[Any]
    dtype: Literal["float32", "int64"]
    shape: list[_Int64] | None = None
    sparse_crow_indices: list[_Int64] | None = None
    sparse_col_indices: list[_Int64] | None = None


class _Datum(_Part):
    model_input: _ModelInput
    loss_fn_inputs: dict[str, _Tensor]


class _Input(_Part):
    data: list[_Datum]
    loss_fn: str
    loss_fn_config: dict[str, _Setting] | None = None


class _Header(_Part):
    model_id: str
    seq_id: StrictInt


def read_json(body: bytes, *, route: str) -> tuple[CallHeader, DecodeOperation]:
    """Return the place of a call, and a function that decodes its datums.

    Raises:
        RecordError: the body is no JSON object with a model and a sequence number.
    """
    try:
        content = from_json(body)
        header = _Header.model_validate(content)
    except ValidationError as error:
        raise RecordError(_problem(error)) from error
    except ValueError as error:
        raise RecordError(f"the body is no JSON: {error}") from error
    decode = functools.partial(_operation, content, _INPUT_OF_ROUTE[route])
    return CallHeader(header.model_id, header.seq_id), decode


def _operation(content: dict[str, Any], field: str, request_id: str) -> Operation:
    try:
        call = _Input.model_validate(content.get(field))
    except ValidationError as error:
        raise BatchingError(f"{field}: {_problem(error)}") from error
    data = [_datum(place, datum) for place, datum in enumerate(call.data)]
    return make_operation(request_id, data, loss=call.loss_fn, settings=call.loss_fn_config or {})


def _datum(place: int, datum: _Datum) -> RawDatum:
    chunks: list[NDArray[np.int32]] = []
    for chunk in datum.model_input.chunks:
        require_tokens(chunk.type or "encoded_text", place=place)
        chunks.append(np.array(chunk.tokens or [], np.int32))
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
        return np.array(data, dtype)
    except OverflowError as error:
        raise BatchingError(f"{name}: a value does not fit into {dtype}") from error


def _problem(error: ValidationError) -> str:
    """Return the first problem, with its field and the value there."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in first["loc"])
    got = "" if first["type"] == "missing" else f", got {_short(first['input'])}"
    return f"{path.removeprefix('.') or 'the body'}: {first['msg'].lower()}{got}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
