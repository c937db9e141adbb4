"""Damaged gRPC requests to a batcher, and its answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import grpc

from fuzz.damage import damaged, damaged_message
from turnstream.wire.v1 import batches_pb2 as wire

_SERVICE = "/turnstream.wire.v1.Batches/"
_TIMEOUT_S = 10.0
_WAIT_S = 0.01

Metadata = Sequence[tuple[str, str | bytes]]

REFUSALS = {
    *("OK", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "FAILED_PRECONDITION", "ABORTED"),
    *("OUT_OF_RANGE", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "DEADLINE_EXCEEDED"),
    *("UNAUTHENTICATED", "PERMISSION_DENIED", "DATA_LOSS"),
}
"""Answers that name the error in a request or in a damaged run, or end the requested wait."""


class Answer(NamedTuple):
    """The answer to a request; `code` is the name of its gRPC status."""

    method: str
    code: str
    details: str


def send_any(
    channel: grpc.Channel, run: str, rng: random.Random, *, metadata: Metadata, damages: bool
) -> Answer:
    """Send one of the requests, damaged or as it is."""
    method, request, is_stream = rng.choice([*_requests(run)])
    data = request.SerializeToString()
    if damages:
        data = (damaged_message if rng.random() < 0.7 else damaged)(data, rng)
    make: Callable[..., Any] = channel.unary_stream if is_stream else channel.unary_unary
    call = make(_SERVICE + method, request_serializer=bytes, response_deserializer=bytes)
    try:
        reply = call(data, timeout=_TIMEOUT_S, metadata=metadata)
        for _ in reply if is_stream else ():
            pass
    except grpc.RpcError as error:
        ended: Any = error
        return Answer(method, ended.code().name, ended.details() or "")
    return Answer(method, "OK", "")


def _requests(run: str) -> Iterator[tuple[str, Any, bool]]:
    """Yield valid requests of every method: name, message, whether the reply is a stream."""
    token = "v1:main:1:" + 64 * "0"
    yield "Start", wire.StartRequest(run=run, dp_world_size=1, session="s"), False
    yield "Start", wire.StartRequest(run=run, recovery_token=token, dp_world_size=1), False
    get = wire.GetRequest(run=run, step=1, dp_world_size=1, session_epoch=1, wait_s=_WAIT_S)
    yield "Get", get, True
    observed = wire.GetRequest(run=run, step=1, dp_world_size=1, observer="o", wait_s=_WAIT_S)
    yield "Get", observed, True
    stepped = wire.SteppedRequest(run=run, step=1, session_epoch=1, manifest_hash=64 * "0")
    yield "Stepped", stepped, False
    yield "Committed", wire.CommittedRequest(run=run, recovery_token=token), False
    yield "Observe", wire.ObserveRequest(run=run, observer="o", first_step=1, expiry_s=5.0), False
    yield "Observed", wire.ObservedRequest(run=run, observer="o", step=1), False
    version = wire.AnnounceVersionRequest(run=run, version=1, step=1, session_epoch=1)
    yield "AnnounceVersion", version, False
