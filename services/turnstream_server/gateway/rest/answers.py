"""Responses with the content of a model, which are made in a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import redis
from fastapi.responses import Response
from pydantic import BaseModel

from turnstream_server.gateway.rest.access import Caller
from turnstream_server.gateway.rest.bodies import JSON


async def answer(
    caller: Caller,
    kind: type[BaseModel],
    read: Callable[[redis.Redis], Any],
    *,
    status: int = 200,
) -> Response:
    """Return a response with what a function of the store returns, as a model of this kind."""

    def encoded(client: redis.Redis) -> bytes:
        return kind.model_validate(read(client)).model_dump_json().encode()

    return Response(await caller.gateway.threads.run(encoded), status, media_type=JSON)
