"""The health of a batcher, asked as a balancer asks."""

from __future__ import annotations

from typing import Any, NamedTuple

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from turnstream_server.batcher.serving.health import TROUBLE


class Told(NamedTuple):
    """An answer.

    Attributes:
        state: number of a `ServingStatus`: red or green.
        trouble: why it is red.
    """

    state: int
    trouble: str


def ask_health(address: str, *, timeout_s: float = 10.0) -> Told:
    """Return the state of the batcher that listens at "host:port"."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = HealthStub(channel)
        reply, call = stub.Check.with_call(HealthCheckRequest(), timeout=timeout_s)
        trailing: dict[str, Any] = dict(call.trailing_metadata() or ())
        return Told(reply.status, trailing.get(TROUBLE, ""))
