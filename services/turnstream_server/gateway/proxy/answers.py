"""The answer of an engine: read whole, or chunk by chunk while it arrives."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final

import httpx2
from pydantic_core import from_json

from turnstream.errors import RejectedError, UnavailableError
from turnstream_server.gateway.config import EngineKind
from turnstream_server.gateway.proxy.requests import chunks_of
from turnstream_server.gateway.proxy.sse import Event, EventReader, EventStreamError

MAX_ANSWER_BYTES: Final = 8 << 20
"""Bytes of an answer. As Python objects, they take about ten times as many."""

_MAX_EVENT_BYTES: Final = 16 << 20
"""The token ids of a prompt are one event: 2 million tokens."""

_MAX_ERROR_BYTES: Final = 1 << 20
_SHOWN_CHARACTERS: Final = 300


class CutStreamError(UnavailableError):
    """The stream of an engine ended before its last event, or with an error of the engine."""


class EngineRefusalError(RejectedError):
    """An engine refused a call.

    Attributes:
        status: its HTTP status, 400 to 499.
        body: JSON of its answer, for the agent.
    """

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        super().__init__(f"the engine answered HTTP {status}: {reason_of(body)}")
        self.status = status
        self.body = body
        self.args = (status, body)


class FailedEngineError(UnavailableError):
    """An engine did not answer a call; another one may."""


class PausedEngineError(FailedEngineError):
    """An engine takes no calls for now, most times because its weights are replaced."""


class EngineAnswer:
    """The answer of an engine to one call.

    Attributes:
        status: its HTTP status, 200.
        kind: kind of the engine.
        engine: the engine, as in `--engine`.
        is_stream: the agent asked for a stream, so `chunks` has the answer; else `whole` has it.
    """

    def __init__(
        self,
        content: Mapping[str, Any] | EngineStream,
        *,
        kind: EngineKind,
        engine: str,
        is_stream: bool,
    ) -> None:
        self.status = HTTPStatus.OK.value
        self.kind = kind
        self.engine = engine
        self.is_stream = is_stream
        self._content = content

    async def whole(self) -> dict[str, Any]:
        """Return the JSON of an answer that is no stream."""
        assert not isinstance(self._content, EngineStream), "this answer is a stream"
        return dict(self._content)

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the JSON of each event of a stream.

        A whole answer is one more than its choices as chunks: see `chunks_of`.

        Raises:
            CutStreamError: the stream ended without its last event.
        """
        if not isinstance(self._content, EngineStream):
            for chunk in chunks_of(self._content):
                yield chunk
            return
        while (chunk := await self._content.next()) is not None:
            yield chunk


class EngineStream:
    """The chunks of a response that is a stream of events."""

    def __init__(self, response: httpx2.Response, *, engine: str) -> None:
        self._parts = response.aiter_bytes()
        self._engine = engine
        self._reader = EventReader(max_event_bytes=_MAX_EVENT_BYTES)
        self._ready: deque[Event] = deque()
        self._first: dict[str, Any] | None = None
        self._num_bytes = 0

    async def peek(self) -> None:
        """Wait for the first chunk.

        The agent has got nothing yet, so another engine may take the call after an error.

        Raises:
            EngineRefusalError: the first chunk is an error of the call.
            FailedEngineError: the stream ended before it, or it is another error.
            httpx2.HTTPError: an error of the connection.
        """
        try:
            self._first = await self._read()
        except CutStreamError as error:
            raise FailedEngineError(str(error)) from error
        if self._first is not None and (error := self._first.get("error")):
            code = error.get("code") if isinstance(error, Mapping) else None
            if isinstance(code, int) and is_refusal(code):
                raise EngineRefusalError(code, self._first)
            raise FailedEngineError(f"{self._engine}: {reason_of(self._first)}")

    async def next(self) -> dict[str, Any] | None:
        """Return the next chunk; None after the last one. CutStreamError as of `chunks`."""
        chunk, self._first = self._first, None
        if chunk is None:
            try:
                chunk = await self._read()
            except httpx2.HTTPError as error:
                raise CutStreamError(f"{self._engine}: {described(error)}") from error
        if chunk is not None and chunk.get("error"):
            raise CutStreamError(f"{self._engine} ended its stream: {reason_of(chunk)}")
        return chunk

    async def close(self) -> None:
        """Read no more."""
        await self._parts.aclose()  # pyright: ignore[reportAttributeAccessIssue] - a generator

    async def _read(self) -> dict[str, Any] | None:
        try:
            while not self._ready:
                self._ready.extend(self._reader.feed(await self._received()))
            event = self._ready.popleft()
            return None if event.is_done else event.json()
        except EventStreamError as error:
            raise CutStreamError(f"{self._engine}: {error}") from error

    async def _received(self) -> bytes:
        received = await anext(self._parts, b"")
        self._num_bytes += len(received)
        if not received:
            raise CutStreamError(f"{self._engine} ended its stream without the event [DONE]")
        if self._num_bytes > MAX_ANSWER_BYTES:
            raise CutStreamError(f"{self._engine}: {too_large(MAX_ANSWER_BYTES)}")
        return received


async def read_whole(response: httpx2.Response, *, engine: str) -> dict[str, Any]:
    """Return the JSON of a response.

    Raises:
        RejectedError: it is larger than MAX_ANSWER_BYTES.
        FailedEngineError: it is cut, or no JSON object.
    """
    body = await _read_body(response, max_bytes=MAX_ANSWER_BYTES)
    if body is None:
        raise RejectedError(f"{engine}: {too_large(MAX_ANSWER_BYTES)}")
    with contextlib.suppress(ValueError):
        content = from_json(body, cache_strings="keys")
        if isinstance(content, dict) and isinstance(content.get("choices"), list):
            return content
    shown = body[:_SHOWN_CHARACTERS].decode(errors="replace")
    raise FailedEngineError(f"{engine} answered {shown!r}, which has no choices")


async def read_error(response: httpx2.Response) -> dict[str, Any]:
    """Return the JSON of an error, made of its text where it is no JSON object."""
    body = await _read_body(response, max_bytes=_MAX_ERROR_BYTES) or b""
    with contextlib.suppress(ValueError):
        content = from_json(body)
        if isinstance(content, dict):
            return content
    text = body[:_SHOWN_CHARACTERS].decode(errors="replace")
    return {"error": {"message": text, "type": "engine_error", "param": None, "code": None}}


async def _read_body(response: httpx2.Response, *, max_bytes: int) -> bytes | None:
    """Return a body; None for one that is larger."""
    parts: list[bytes] = []
    num_bytes = 0
    async with contextlib.aclosing(response.aiter_bytes()) as received:  # pyright: ignore[reportArgumentType]
        async for part in received:
            num_bytes += len(part)
            if num_bytes > max_bytes:
                return None
            parts.append(part)
    return b"".join(parts)


def is_refusal(status: int) -> bool:
    """Return whether a status says that the call is wrong, for each engine."""
    return 400 <= status < 500


def message_of(body: Mapping[str, Any]) -> str:
    """Return the sentence in an error, wherever its body has it.

    >>> message_of({"error": {"message": "too long"}}), message_of({"message": "too long"})
    ('too long', 'too long')
    """
    return next(_reasons(body), str(body))


def reason_of(body: Mapping[str, Any]) -> str:
    """Return the sentence in the error of an engine, shortened for another sentence."""
    return message_of(body)[:_SHOWN_CHARACTERS]


def _reasons(body: Mapping[str, Any]) -> Iterator[str]:
    error = body.get("error")
    inner = error.get("message") if isinstance(error, Mapping) else error
    yield from (str(each) for each in (inner, body.get("message"), body.get("detail")) if each)


def described(error: httpx2.HTTPError) -> str:
    """Return the name and text of an error of a connection."""
    return f"{type(error).__name__}: {error}"


def too_large(limit: int) -> str:
    """Return the sentence about an answer above a limit in bytes."""
    return f"its answer has more than {limit >> 20} MiB, the most that is read"
