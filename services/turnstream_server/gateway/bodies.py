"""Bodies of requests: counted as they arrive in the memory that all bodies share, and parsed.

A parser of JSON holds the interpreter lock until it has read the whole body, also in a thread. Then
no other request is answered. So small bodies are parsed in the event loop, others in threads of
their own, and large JSON in a process. JSON is counted before it is parsed: few bytes may become
many objects.
"""

from __future__ import annotations

import asyncio
import functools
import json
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Final, TypeVar

from anyio import BrokenWorkerProcess, CapacityLimiter, to_process
from fastapi import Depends, HTTPException, Request
from fastapi.responses import Response
from starlette.types import Message, Receive

from turnstream.errors import RecordError, UnavailableError
from turnstream_server.interpreter import return_free_memory
from turnstream_server.keys.limits import Meter, Places

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


IN_LOOP_BYTES: Final = 64 << 10
"""Largest body that is parsed in the event loop: a thread costs more than that."""

IN_THREAD_JSON_BYTES: Final = 256 << 10
"""Largest JSON that is parsed in a thread: a process costs more than that."""

MAX_JSON_BYTES: Final = 12 << 20
"""Largest body of JSON. Parsed, it takes up to fifteen times its size in memory."""

MAX_BRACKETS: Final = 1 << 19
"""Objects and lists of one JSON body: each takes up to 200 bytes and 4 µs. Texts count too."""

MAX_QUOTES: Final = 1 << 20
"""Quotation marks of one JSON body, two per text."""

_NUM_THREADS: Final = 4
_NUM_PROCESSES: Final = 2
"""An owner uses half of either at most, so that another one gets the next free one."""

_LONGEST_S: Final = 60.0
"""Time for one call of a process. The largest body takes about 2 s of a core."""

_Result = TypeVar("_Result")


class Parsers:
    """The threads and processes that parse the bodies of one gateway process."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="gateway-parse")
        self._thread_places = _half_of(_NUM_THREADS)
        self._process_places = _half_of(_NUM_PROCESSES)
        self._free_processes = asyncio.Semaphore(_NUM_PROCESSES)

    async def run(
        self,
        parse: Callable[[bytes], _Result],
        body: bytes,
        *,
        owner: str,
        is_json: bool = False,
    ) -> _Result:
        """Return the content of a body, or raise the error of its parser.

        If `is_json`, the parser holds the interpreter lock, and can be pickled with its result and
        its errors. RecordError for JSON that would become too many Python objects; a body that is
        parsed in the event loop is too small for that.
        """
        if len(body) <= IN_LOOP_BYTES:
            return parse(body)
        if is_json:
            parse = functools.partial(_parse_json, parse)
        if is_json and len(body) > IN_THREAD_JSON_BYTES:
            async with self._process_places.borrow(owner) as place:
                await place.take()
                async with self._free_processes:
                    return await self._in_process(parse, body)
        return await self.in_thread(lambda: parse(body), owner=owner)

    async def in_thread(self, call: Callable[[], _Result], *, owner: str) -> _Result:
        """Return the result of a call that holds the interpreter lock for short times only."""
        async with self._thread_places.borrow(owner) as place:
            await place.take()
            return await self._in_thread(call)

    async def close(self) -> None:
        """End the threads, once running calls have returned. Processes end with the event loop."""
        await asyncio.to_thread(self._threads.shutdown)

    async def _in_thread(self, call: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def _in_process(self, parse: Callable[[bytes], _Result], body: bytes) -> _Result:
        """Return the result of a process; UnavailableError if it has ended, or takes too long."""
        try:
            async with asyncio.timeout(_LONGEST_S):
                answer = await to_process.run_sync(
                    *(_pickled, parse, body), cancellable=True, limiter=CapacityLimiter(1)
                )
        except TimeoutError as error:
            text = f"the body was not parsed within {_LONGEST_S:g} s"
            raise UnavailableError(text) from error
        except BrokenWorkerProcess as error:
            raise UnavailableError("the process that parses the body has ended") from error
        return await self._in_thread(lambda: pickle.loads(answer))  # noqa: S301 - ours


def _pickled(parse: Callable[[bytes], Any], body: bytes) -> bytes:
    """Return the content of a body, pickled: the caller reads it in a thread.

    Ctrl-C reaches this process too. The gateway finishes its requests first, so it is ignored.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answer = pickle.dumps(parse(body), protocol=5)
    return_free_memory()
    return answer


def _parse_json(parse: Callable[[bytes], _Result], body: bytes) -> _Result:
    if len(body) > MAX_JSON_BYTES:
        raise RecordError(f"the body has {len(body)} bytes of JSON, more than {MAX_JSON_BYTES}")
    found = {"brackets": body.count(b"{") + body.count(b"["), "quotation marks": body.count(b'"')}
    for (name, count), most in zip(found.items(), (MAX_BRACKETS, MAX_QUOTES), strict=True):
        if count > most:
            raise RecordError(f"the body has {count} {name}, more than {most}: send less at once")
    return parse(body)


def _half_of(num_places: int) -> Places:
    most = num_places // 2
    return Places(shared=most, alone=most, held_s=_LONGEST_S)
