"""Bodies of requests: counted as they arrive, in the memory that all bodies share."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Annotated, Any, Final

from fastapi import Depends, HTTPException, Request
from fastapi.responses import Response
from starlette.types import Message, Receive

from turnstream_server.keys.limits import Meter

BODY: Final = "turnstream.body"
"""Entry of the scope of a request: its `RequestBody`."""

MAX_SHARED_BYTES: Final = 512 << 20
"""Bytes of all bodies in flight in one process, as they were sent and unpacked."""

MAX_OWNER_BYTES: Final = MAX_SHARED_BYTES // 2
"""Bytes of the bodies in flight of one key: other keys can use the rest."""

STALLED_S: Final = 30.0
"""Time without a byte after which a body is dropped."""

MAX_SMALL_BYTES: Final = 64 << 10
"""Largest body of a call without datums and prompts: it is parsed in the event loop."""

_RETRY: Final = {"Retry-After": "1"}


class BodyMemory:
    """Bytes of all bodies in flight in one process, by the owner of the key."""

    def __init__(self) -> None:
        self._num_bytes: dict[str, int] = {}
        self._total = 0
        self._lock = threading.Lock()  # bodies are unpacked in threads

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all bodies."""
        return self._total

    def take(self, owner: str, num_bytes: int) -> None:
        """Count bytes of a body; HTTPException 429 where they are too many."""
        with self._lock:
            own = self._num_bytes.get(owner, 0) + num_bytes
            if own > MAX_OWNER_BYTES or self._total + num_bytes > MAX_SHARED_BYTES:
                raise HTTPException(429, _full_text(own), headers=_RETRY)
            self._num_bytes[owner] = own
            self._total += num_bytes

    def release(self, owner: str, num_bytes: int) -> None:
        """Count bytes as free."""
        with self._lock:
            self._total -= num_bytes
            left = self._num_bytes.get(owner, 0) - num_bytes
            if left > 0:
                self._num_bytes[owner] = left
            else:
                self._num_bytes.pop(owner, None)


class RequestBody:
    """The body of a request, counted as it arrives and as it is unpacked.

    The meter has counted the `declared` bytes already. The owner is "" without a key.
    """

    def __init__(
        self,
        receive: Receive,
        *,
        limit: int,
        declared: int,
        meter: Meter | None,
        memory: BodyMemory,
        owner: str,
    ) -> None:
        self.limit = limit
        self._receive = receive
        self._num_counted = declared
        self._meter = meter
        self._memory = memory
        self.owner = owner
        self._num_taken = 0
        self._whole: bytes | None = None

    async def read(self) -> None:
        """Receive the whole body, unless the client disconnects.

        HTTPException 408 for a body that stops to arrive, 413 for a part beyond the limit, 429
        where all bodies need too much memory.
        """
        body, has_more = bytearray(), True
        while has_more:
            message = await self._next()
            if message["type"] != "http.request":
                return
            part = message.get("body", b"")
            self._count(len(part))
            body += part
            has_more = message.get("more_body", False)
        self._whole = bytes(body)

    async def receive(self) -> Message:
        """Return the body that was read, and then the further messages of the request."""
        if self._whole is None:
            return await self._receive()
        body, self._whole = self._whole, None
        return {"type": "http.request", "body": body, "more_body": False}

    def count_unpacked(self, num_bytes: int) -> None:
        """Count bytes that a compressed body was unpacked to. Errors as of `read`."""
        self._take(num_bytes)
        if self._meter is not None:
            self._meter.add_bytes(num_bytes)

    def close(self) -> None:
        """Release the memory: the request has ended."""
        self._memory.release(self.owner, self._num_taken)
        self._num_taken = 0

    async def _next(self) -> Message:
        try:
            async with asyncio.timeout(STALLED_S):
                return await self._receive()
        except TimeoutError as error:
            text = f"no byte of the body has arrived for {STALLED_S:g} s"
            raise HTTPException(408, text, headers={"Connection": "close"}) from error

    def _count(self, num_bytes: int) -> None:
        self._take(num_bytes)
        if self._meter is not None and self._num_taken > self._num_counted:
            self._meter.add_bytes(self._num_taken - self._num_counted)
            self._num_counted = self._num_taken
        if self._num_taken > self.limit:
            raise HTTPException(413, too_large_text(self.limit))

    def _take(self, num_bytes: int) -> None:
        self._memory.take(self.owner, num_bytes)
        self._num_taken += num_bytes


def body_of(request: Request) -> RequestBody:
    """Return the body of a request."""
    body: RequestBody = request.scope[BODY]
    return body


def too_large_text(limit: int) -> str:
    """Return the message of status 413."""
    return f"the body has more than {limit} bytes"


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


async def disconnected(_: Request, __: Exception) -> Response:
    """Return the answer to an upload that its client has ended; it is never received."""
    return Response(status_code=499)


def json_response(content: Any, *, status: int = 200) -> Response:
    """Return a response in JSON."""
    body = json.dumps(content, separators=(",", ":")).encode()
    return Response(body, status, media_type="application/json")


def _full_text(own: int) -> str:
    return (
        f"the gateway has no memory for this body: the bodies in flight of its key would have "
        f"{own} bytes, and may have {MAX_OWNER_BYTES}; those of all keys {MAX_SHARED_BYTES}"
    )
