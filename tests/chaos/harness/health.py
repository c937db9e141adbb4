"""What a batcher says of its health, asked as a balancer asks."""

from __future__ import annotations

from typing import Any, NamedTuple

import grpc
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from turnstream_server.batcher.health import HEALTH_SERVICE, TROUBLE, Health


class Told(NamedTuple):
    """An answer.

    Attributes:
        state: red or green.
        trouble: why it is red.
    """

    state: Health
    trouble: str


def ask_health(address: str, *, timeout_s: float = 10.0) -> Told:
    """The state of the batcher that listens at "host:port"."""
    with grpc.insecure_channel(address) as channel:
        check: Any = channel.unary_unary(
            f"/{HEALTH_SERVICE}/Check",
            request_serializer=StringValue.SerializeToString,
            response_deserializer=Int32Value.FromString,
        )
        reply, call = check.with_call(StringValue(), timeout=timeout_s)
        trailing: dict[str, Any] = dict(call.trailing_metadata() or ())
        return Told(Health(reply.value), trailing.get(TROUBLE, ""))
