"""Datums of a training call as arrays, whatever encoding they came in.

Every error names the datum, the field, the value and the expected one. A call on the next
mini-batch of a run has the rows of the run: a client of the SDK sends one placeholder datum, and
the name of the run as a setting of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.rows.operations import (
    LOSS_INPUTS,
    LOSS_SETTINGS,
    Datum,
    Operation,
    check_operation,
)
from turnstream.errors import BatchingError
from turnstream_server.operations.contents import ForwardBackwardRun
from turnstream_server.operations.results import Failure

_DTYPES: Final[dict[str, str]] = {
    "target_tokens": "int64",
    "weights": "float32",
    "logprobs": "float32",
    "advantages": "float32",
    "sequence_ratio_mask": "float32",
}
"""The loss inputs, and the dtype of each."""

_REFUSED_LOSSES: Final = ("stable_reinforce", "custom")
_REFUSED_CHUNKS: Final = {"image": "image", "image_asset_pointer": "image", "dmel": "audio"}

MAX_VALUES: Final = 1 << 21
"""Most values of one loss input in all datums of a call, counted as dense arrays. Sparse rows need
no bytes for a shape of any size, and the result has a log-probability for each target."""


class TrainingCall(NamedTuple):
    """A call that runs datums through a model.

    Attributes:
        model_id: the model.
        seq_id: place among the calls of the model, from 1.
        forward_only: the gradients stay as they are.
        is_sparse: its arrays may be far larger than its body.
        operation: the operation, or the call on a run. A refused one uses up its number too.
    """

    model_id: str
    seq_id: int
    forward_only: bool
    is_sparse: bool
    operation: Operation | ForwardBackwardRun | Failure


class SparseRows(NamedTuple):
    """The places of the values of a matrix, in compressed sparse rows: int64 arrays."""

    crow_indices: NDArray[np.int64]
    col_indices: NDArray[np.int64]


class LossInput(NamedTuple):
    """An array of a datum as it was sent: flat, float32 or int64. None stands for its own shape."""

    values: NDArray[Any]
    shape: tuple[int, ...] | None = None
    sparse: SparseRows | None = None


class RawDatum(NamedTuple):
    """A datum as it was sent: the tokens of its chunks, int32, and its named loss inputs."""

    chunks: Sequence[NDArray[np.int32]]
    inputs: Mapping[str, LossInput]


def make_operation(
    request_id: str, data: Sequence[RawDatum], *, loss: str, settings: Mapping[str, float | str]
) -> Operation | ForwardBackwardRun:
    """Return the operation of a call, or the call on a run; BatchingError if it has none."""
    run = settings.get(RUN)
    if isinstance(run, str):
        require_placeholder(*(sum(map(len, each.chunks)) for each in data), run=run)
        others = {name: value for name, value in settings.items() if name != RUN}
        return make_run_call(run, loss_fn=loss, settings=others)
    _require_few_values(data)
    if loss in _REFUSED_LOSSES:
        raise BatchingError(f"loss_fn {loss!r} is not supported; known: {', '.join(LOSS_INPUTS)}")
    operation = Operation(
        request_id=request_id,
        loss=loss,
        data=[_datum(place, datum) for place, datum in enumerate(data)],
        settings={name: _number(name, value) for name, value in settings.items()},
    )
    check_operation(operation)
    return operation


def require_tokens(kind: str, *, name: str) -> None:
    """Raise BatchingError, with the name of the input, unless a chunk of this kind has tokens."""
    if kind != "encoded_text":
        named = _REFUSED_CHUNKS.get(kind, repr(kind))
        message = f"chunks of type {named} are not supported, only encoded_text"
        raise BatchingError(f"{name}: {message}")


def _require_few_values(data: Sequence[RawDatum]) -> None:
    """Raise BatchingError if a loss input has too many values, before any of them is made."""
    for name in _DTYPES:
        shapes = [_shape(each.inputs[name]) for each in data if name in each.inputs]
        total = sum(max(0, math.prod(each)) for each in shapes)
        if total > MAX_VALUES:
            widest = max(shapes, key=math.prod)
            sent = f"{total} values in {len(data)} datums, one of them of shape {widest}"
            raise BatchingError(
                f"{name}: {sent}, expected at most {MAX_VALUES} in a call: send fewer datums a call"
            )


def _shape(sent: LossInput) -> tuple[int, ...]:
    return sent.values.shape if sent.shape is None else sent.shape


def _datum(place: int, raw: RawDatum) -> Datum:
    for name in raw.inputs:
        if name not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise BatchingError(f"datum {place}: loss input {name!r} is unknown; known: {known}")
    if "target_tokens" not in raw.inputs:
        raise BatchingError(f"datum {place}: loss input target_tokens is missing")
    arrays: dict[str, Any] = {
        name: _array(f"datum {place}, {name}", each, dtype=_DTYPES[name])
        for name, each in raw.inputs.items()
    }
    tokens = np.concatenate([np.empty(0, np.int32), *raw.chunks])
    return Datum(model_input=tokens, **arrays)


def _array(name: str, sent: LossInput, *, dtype: str) -> NDArray[Any]:
    if sent.values.dtype != np.dtype(dtype):
        raise BatchingError(f"{name}: dtype {sent.values.dtype}, expected {dtype}")
    shape = _shape(sent)
    if max(shape, default=0) > MAX_VALUES:  # next to a dimension of 0
        raise BatchingError(f"{name}: shape {shape}, expected at most {MAX_VALUES} values")
    if sent.sparse is not None:
        return _dense(name, sent.values, shape=shape, sparse=sent.sparse)
    if not shape or len(sent.values) != math.prod(shape) or min(shape) < 0:
        raise BatchingError(f"{name}: {len(sent.values)} values for shape {shape}")
    return sent.values.reshape(shape)


def _dense(
    name: str, values: NDArray[Any], *, shape: tuple[int, ...], sparse: SparseRows
) -> NDArray[Any]:
    rows, columns = sparse
    if len(shape) != 2 or min(shape) < 0:
        raise BatchingError(f"{name}: sparse rows of shape {shape}, expected two dimensions")
    counts = np.diff(rows)
    is_valid = (
        len(rows) == shape[0] + 1
        and not (rows[0] or (counts < 0).any())
        and rows[-1] == len(columns) == len(values)
        and bool(((columns >= 0) & (columns < shape[1])).all())
    )
    if not is_valid:
        raise BatchingError(f"{name}: indices of sparse rows do not fit shape {shape}")
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def _number(name: str, value: float | str) -> float:
    if isinstance(value, str):
        raise BatchingError(f"loss_fn_config[{name!r}] is the text {value!r}, expected a number")
    return value


RUN: Final = "run"
"""Setting of the loss that names a run."""

_LOSSES: Final = ("ppo",)
_BOUNDS: Final = {"clip_low_threshold": (0.0, 1.0), "clip_high_threshold": (1.0, math.inf)}


def make_run_call(
    run: str, *, loss_fn: str, settings: Mapping[str, float | str]
) -> ForwardBackwardRun:
    """Return the content of a call on a run; BatchingError names a value that is not supported."""
    if not run:
        raise BatchingError("run is empty, expected the name of a run")
    if loss_fn not in _LOSSES:
        known = ", ".join(_LOSSES)
        raise BatchingError(f"loss_fn {loss_fn!r} is not supported on a run; known: {known}")
    checked = {name: _checked(name, value, loss_fn) for name, value in settings.items()}
    return ForwardBackwardRun(run, loss_fn, checked)


def require_placeholder(*lengths: int, run: str) -> None:
    """Raise BatchingError unless the datums of these lengths are one placeholder."""
    if lengths != (1,):
        sent = f"{len(lengths)} datums of {sum(lengths)} tokens"
        expected = "expected one datum of one token: the rows are those of the run"
        raise BatchingError(f"the call on run {run!r} has {sent}, {expected}")


def _checked(name: str, value: float | str, loss_fn: str) -> float:
    if name not in LOSS_SETTINGS[loss_fn]:
        known = ", ".join((RUN, *LOSS_SETTINGS[loss_fn]))
        raise BatchingError(f"loss_fn_config has {name!r}; {loss_fn} on a run has: {known}")
    low, high = _BOUNDS[name]
    if isinstance(value, str) or not low <= value <= high or math.isinf(value):
        bounds = f"{low:g} to {high:g}" if math.isfinite(high) else f"{low:g} or more"
        raise BatchingError(f"loss_fn_config[{name!r}] is {value!r}, expected {bounds}")
    return float(value)
