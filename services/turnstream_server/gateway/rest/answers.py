"""Responses with the content of a model or a dataclass, which are made in a thread."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import redis
from fastapi.responses import Response
from pydantic import TypeAdapter

from turnstream_server.gateway.rest.bodies import JSON
from turnstream_server.gateway.rest.caller import Caller


async def answer(
    caller: Caller,
    kind: type[Any],
    read: Callable[[redis.Redis], Any],
    *,
    status: int = 200,
) -> Response:
    """Return a response with what a function of the store returns, checked as this kind."""

    def encoded(client: redis.Redis) -> bytes:
        content = _adapter(kind)
        return content.dump_json(content.validate_python(read(client)))

    return Response(await caller.gateway.threads.run(encoded), status, media_type=JSON)


@functools.cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
