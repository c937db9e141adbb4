"""The body of a `forward_backward` or `forward`, in protobuf or JSON, as one kind of call.

Reading has two steps. `read_training_call` finds the model and the sequence number, without which
there is nothing to answer. `TrainingCall.operation` decodes the datums. If it refuses them, the
number is used up all the same, and the call fails with the message.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from turnstream.errors import RecordError
from turnstream_server.gateway.tinker.encodings import JSON, PROTOBUF, media_type_of
from turnstream_server.gateway.tinker.header import Decoded, DecodeOperation
from turnstream_server.gateway.tinker.json_calls import read_json
from turnstream_server.gateway.tinker.protobuf_calls import read_protobuf


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCall:
    """A call that runs datums through a model.

    Attributes:
        model_id: the model.
        seq_id: place among the calls of the model, from 1.
        forward_only: the gradients stay as they are.
        is_sparse: its arrays may be far larger than its body.
        operation: takes a request id, and returns the operation, or the call on a run; or raises
            BatchingError.
    """

    model_id: str
    seq_id: int
    forward_only: bool
    is_sparse: bool
    operation: DecodeOperation


def decode_training_call(body: bytes, *, content_type: str, route: str) -> TrainingCall:
    """Return the call in a body, with decoded datums; see `read_training_call`."""
    call = read_training_call(body, content_type=content_type, route=route)
    request_id = f"{call.model_id}:{call.seq_id}"
    return replace(call, operation=Decoded.run(lambda: call.operation(request_id)))


def read_training_call(body: bytes, *, content_type: str, route: str) -> TrainingCall:
    """Return the call in a body.

    Args:
        body: as it was sent.
        content_type: header of the request; parameters such as a charset are ignored.
        route: "forward_backward", or "forward" of releases before 0.25.

    Raises:
        RecordError: the body names no model and no sequence number.
    """
    kind = media_type_of(content_type)
    if kind == PROTOBUF:
        header, operation = read_protobuf(body)
    elif kind == JSON:
        header, operation = read_json(body, route=route)
    else:
        raise RecordError(f"Content-Type is {content_type!r}, expected {PROTOBUF} or {JSON}")
    if not header.model_id:
        raise RecordError("model_id is empty, expected the id of a model")
    if header.seq_id < 1:
        raise RecordError(f"seq_id is {header.seq_id}, expected 1 or more")
    return TrainingCall(
        model_id=header.model_id,
        seq_id=header.seq_id,
        forward_only=header.forward_only or route == "forward",
        is_sparse=header.is_sparse,
        operation=operation,
    )
