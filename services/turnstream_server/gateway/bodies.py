"""Bodies of requests: read within a limit, and decoded in a thread if they are big."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Annotated, Any, Final, TypeVar

from fastapi import Depends, HTTPException, Request
from fastapi.responses import Response
from pydantic import BaseModel

from turnstream.errors import RecordError
from turnstream_server.gateway.state import Gateway
from turnstream_server.gateway.tinker.json_parts import read_header

IN_LOOP_BYTES: Final = 64 << 10
"""Largest body that is decoded in the event loop: a thread costs more than that."""

_Result = TypeVar("_Result")
_Model = TypeVar("_Model", bound=BaseModel)


async def read_body(request: Request) -> bytes:
    """Return the body of a request; 413 for one that is too large."""
    gateway: Gateway = request.app.state.gateway
    limit = gateway.options.max_body_bytes
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > limit:
            raise HTTPException(413, f"the body has more than {limit} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


Body = Annotated[bytes, Depends(read_body)]


def read_json(body: bytes, model: type[_Model]) -> _Model:
    """Return the fields of a JSON body; RecordError names a wrong field and its value."""
    return read_header(body, model)[1]


def read_object(body: bytes) -> dict[str, Any]:
    """Return the object in a JSON body; RecordError for another body."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"the body is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise RecordError(f"the body is {type(content).__name__}, expected an object")
    return content


def json_response(content: Any, *, status: int = 200) -> Response:
    """Return a response in JSON."""
    body = json.dumps(content, separators=(",", ":")).encode()
    return Response(body, status, media_type="application/json")


async def off_loop(
    call: Callable[[], _Result], *, num_bytes: int, turn: asyncio.Lock | None = None
) -> _Result:
    """Return the result of a call on a body of this size, in a thread if it is big.

    Big ones that share a `turn` are converted one after another.
    """
    if num_bytes <= IN_LOOP_BYTES:
        return call()
    async with turn or contextlib.nullcontext():
        return await asyncio.to_thread(call)
