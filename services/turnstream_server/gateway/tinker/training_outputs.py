"""Results of training calls, in the encoding that the SDK accepts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from turnstream.errors import BatchingError
from turnstream.wire import tinker_pb2 as wire
from turnstream_server.gateway.tinker.encodings import Encoded, accepts_protobuf, as_json, as_proto
from turnstream_server.operations.results import TrainingOutput

_TYPE: Final = "ArrayRecord"
_REDUCTIONS: Final = ("mean", "sum", "min", "max", "slack", "hash2", "unique")


def encode_output(output: TrainingOutput, *, accept: str) -> Encoded:
    """Return a result in protobuf if the Accept header of its poll names it, else in JSON.

    BatchingError for a metric that the SDK cannot read, or a number that JSON cannot carry.
    """
    _check_metrics(output.metrics)
    return as_proto(_protobuf(output)) if accepts_protobuf(accept) else as_json(_json(output))


def _protobuf(output: TrainingOutput) -> wire.ForwardBackwardOutput:
    arrays = [np.ascontiguousarray(each, "<f4") for each in output.logprobs]
    offsets = [0, *itertools.accumulate(each.nbytes for each in arrays)]
    logprobs = wire.BatchedTensor(
        data=b"".join(each.tobytes() for each in arrays),
        offsets=np.array(offsets, "<i8").tobytes(),
        dtype=wire.DTYPE_FLOAT32,
        trailing_shape=arrays[0].shape[1:] if arrays else (),
    )
    record = wire.ArrayRecord(
        type_tag=_TYPE, fields={"logprobs": logprobs}, num_datums=len(output.logprobs)
    )
    return wire.ForwardBackwardOutput(
        loss_fn_output_type=_TYPE, loss_fn_outputs=[record], metrics=output.metrics
    )


def _json(output: TrainingOutput) -> dict[str, Any]:
    return {
        "loss_fn_output_type": _TYPE,
        "loss_fn_outputs": ({"logprobs": _tensor(each)} for each in output.logprobs),
        "metrics": output.metrics,
    }


def _tensor(array: NDArray[np.float32]) -> dict[str, Any]:
    return {"data": array.ravel(), "dtype": "float32", "shape": list(array.shape)}


def _check_metrics(metrics: Mapping[str, float]) -> None:
    """Raise BatchingError unless the SDK can reduce each metric over the chunks of a call."""
    if "loss:sum" not in metrics:
        raise BatchingError(f"metrics have no loss:sum, only {', '.join(metrics) or 'none'}")
    for name in metrics:
        if name.partition(":")[2] not in _REDUCTIONS:
            expected = f"<name>:<reduction> with one of {', '.join(_REDUCTIONS)}"
            raise BatchingError(f"metric {name!r}, expected {expected}")
