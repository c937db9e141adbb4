"""Calls of generators as a gateway gets them, and its refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from redis.exceptions import ResponseError

from turnstream.errors import TurnstreamError
from turnstream.store.client.replies import error_text
from turnstream.wire.v1 import calls_pb2 as wire
from turnstream_server.gateway.rest.generators.plan import read_calls
from turnstream_server.keys.records import LOCAL_KEY, ApiKey, Role

SESSION_RUN = "maze of refusals"
"""Run of the session whose calls are varied."""


class Sent(NamedTuple):
    """A call, and the body that it came in."""

    body: wire.Calls
    call: wire.Call

    def alone(self) -> wire.Calls:
        """Return a body with this call alone, which a test may change."""
        found = wire.Calls()
        found.CopyFrom(self.body)
        del found.calls[:]
        found.calls.add().CopyFrom(self.call)
        return found


def key_with(*roles: Role, runs: Sequence[str] = ()) -> ApiKey:
    """Return a key of these roles, bound to these runs."""
    return ApiKey("id", "test", frozenset(roles), runs=tuple(runs))


def refusal(body: wire.Calls | bytes, key: ApiKey = LOCAL_KEY) -> str:
    """Return why the first call of a body is refused for this key, or the body; "" if it is sent.

    The refusal of a body begins with BODY.
    """
    data = body if isinstance(body, bytes) else body.SerializeToString()
    try:
        planned = read_calls(data, key)
    except TurnstreamError as error:
        return f"BODY {error}"
    request = next(iter(planned.requests), None)
    return error_text(request) if isinstance(request, ResponseError) else ""
