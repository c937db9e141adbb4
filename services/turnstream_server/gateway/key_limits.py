"""Limits of requests, before any route: rate and bytes of each key, and the size of a body."""

from __future__ import annotations

import math
import time
from typing import Final

from fastapi import HTTPException
from fastapi.responses import Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnstream.errors import TurnstreamError
from turnstream_server.gateway.access import IDENTITY, secret_of
from turnstream_server.gateway.bodies import json_response
from turnstream_server.gateway.rest.app import PREFIX
from turnstream_server.gateway.rest.problems import Problem, problem_of, response
from turnstream_server.gateway.state import Gateway
from turnstream_server.gateway.web_pages import refusal_of
from turnstream_server.keys.limits import Meter, Meters, too_fast
from turnstream_server.keys.records import ApiKey

_STRANGER_BYTES: Final = 64 << 10
"""Largest body of a request without an accepted key: it is read before the key is required."""


class LimitedApp:
    """An application whose requests are limited by their keys.

    It identifies the key of each request, for the routes too. A request without an accepted
    key is passed on, because some routes need none.
    """

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway
        self._meters = Meters()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it with status 413 or 429."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        options = self._gateway.options
        takes_any_host = options.requires_key and not options.names
        page = refusal_of(headers, names=options.names, takes_any_host=takes_any_host)
        if page is not None:
            await _refused(scope, page.status, page.text)(scope, receive, send)
            return
        try:
            scope[IDENTITY] = await self._gateway.keys.identify(secret_of(headers))
        except TurnstreamError as error:
            scope[IDENTITY] = error
        now_s = time.monotonic()
        limit, meter = self._limits_of(scope[IDENTITY], now_s=now_s)
        declared = _declared_bytes(headers)
        if declared > limit:
            found = scope[IDENTITY]
            is_known = isinstance(found, ApiKey)
            too_large = _refused(scope, 413, _too_large_text(limit))
            refusal = too_large if is_known else _not_known(scope, found)
            await refusal(scope, receive, send)
            return
        wait_s = 0.0 if meter is None else meter.admit(declared, now_s=now_s)
        if wait_s:
            await _too_fast(scope, scope[IDENTITY], wait_s)(scope, receive, send)
            return
        body = _Body(receive, limit=limit, declared=declared, meter=meter)
        await self._app(scope, body.receive, send)

    def _limits_of(
        self, found: ApiKey | TurnstreamError, *, now_s: float
    ) -> tuple[int, Meter | None]:
        """Return the largest body of a request, and the use of its key."""
        most = self._gateway.options.max_body_bytes
        if isinstance(found, TurnstreamError):
            return min(most, _STRANGER_BYTES), None
        own = found.limits.max_body_bytes
        return most if own is None else min(most, own), self._meters.of(found, now_s=now_s)


class _Body:
    """The body of a request, counted as it arrives."""

    def __init__(self, receive: Receive, *, limit: int, declared: int, meter: Meter | None) -> None:
        self._receive = receive
        self._limit = limit
        self._num_counted = declared
        self._meter = meter
        self._num_bytes = 0

    async def receive(self) -> Message:
        """Return the next message; 413 for a part beyond the limit."""
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        if self._meter is not None and self._num_bytes > self._num_counted:
            self._meter.add_bytes(self._num_bytes - self._num_counted)
            self._num_counted = self._num_bytes
        if self._num_bytes > self._limit:
            raise HTTPException(413, _too_large_text(self._limit))
        return message


def _declared_bytes(headers: Headers) -> int:
    """Return the length of the body in the headers; 0 if they do not have it."""
    text = headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdecimal() else 0


def _refused(scope: Scope, status: int, text: str) -> Response:
    """Return an answer in the form of the API of the request."""
    if _is_rest(scope):
        return response(Problem(type="about:blank", title=text, status=status, detail=text))
    return json_response({"detail": text}, status=status)


def _not_known(scope: Scope, error: TurnstreamError) -> Response:
    """Return the answer to a large body whose key is not accepted, or cannot be looked up now."""
    problem = problem_of(error)
    if _is_rest(scope):
        return response(problem)
    return json_response({"detail": problem.detail}, status=problem.status)


def _too_large_text(limit: int) -> str:
    return f"the body has more than {limit} bytes"


def _too_fast(scope: Scope, key: ApiKey, wait_s: float) -> Response:
    error = too_fast(key, wait_s=wait_s)
    if _is_rest(scope):
        return response(problem_of(error))
    refusal = json_response({"detail": error.message}, status=429)
    refusal.headers["Retry-After"] = str(max(1, math.ceil(wait_s)))
    return refusal


def _is_rest(scope: Scope) -> bool:
    return scope["path"].startswith(f"{PREFIX}/")
