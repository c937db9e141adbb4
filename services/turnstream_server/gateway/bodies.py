"""Bodies of requests: read within a limit."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, TypeVar

from fastapi import Depends, HTTPException, Request
from fastapi.responses import Response
from pydantic import BaseModel

from turnstream.errors import RecordError
from turnstream_server.gateway.request_body import too_large_text
from turnstream_server.gateway.tinker.json_parts import read_header

MAX_SMALL_BYTES: Final = 64 << 10
"""Largest body of a call without datums and prompts: it is parsed in the event loop."""

_Model = TypeVar("_Model", bound=BaseModel)


async def read_large_body(request: Request) -> bytes:
    """Return the body of a request, which is within the limit of its key."""
    return b"".join([chunk async for chunk in request.stream()])


async def read_body(request: Request) -> bytes:
    """Return the body of a request; 413 for one of more than MAX_SMALL_BYTES."""
    body = await read_large_body(request)
    if len(body) > MAX_SMALL_BYTES:
        raise HTTPException(413, too_large_text(MAX_SMALL_BYTES))
    return body


Body = Annotated[bytes, Depends(read_body)]
LargeBody = Annotated[bytes, Depends(read_large_body)]


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


async def disconnected(_: Request, __: Exception) -> Response:
    """Return the answer to an upload that its client has ended; it is never received."""
    return Response(status_code=499)


def json_response(content: Any, *, status: int = 200) -> Response:
    """Return a response in JSON."""
    body = json.dumps(content, separators=(",", ":")).encode()
    return Response(body, status, media_type="application/json")
