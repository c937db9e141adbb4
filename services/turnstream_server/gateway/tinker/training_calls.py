"""The body of a `forward_backward` or `forward`, in protobuf or JSON, as one kind of call."""

from __future__ import annotations

from turnstream.errors import RecordError
from turnstream_server.gateway.tinker.encodings import JSON, PROTOBUF, media_type_of
from turnstream_server.gateway.tinker.json_calls import read_json
from turnstream_server.gateway.tinker.loss_inputs import TrainingCall
from turnstream_server.gateway.tinker.protobuf_calls import read_protobuf


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
