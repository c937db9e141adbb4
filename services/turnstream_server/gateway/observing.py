"""Observation of requests: an id, a line in the log, metrics and a span for each."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from typing import Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnstream_server.gateway.rest.caller import path_run
from turnstream_server.logs import bound
from turnstream_server.telemetry.instruments import counter, histogram
from turnstream_server.telemetry.tracing import span

logger = logging.getLogger(__name__)

REQUEST_ID: Final = "X-Request-ID"
"""Header of a request, and of its answer. A request without it gets a new one."""

_ACCEPTED: Final = re.compile(r"[!-~]{1,128}")
_METHODS: Final = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_NO_ROUTE: Final = "none"
_DISCONNECTED: Final = 499
"""Status of a request whose client went away before the answer, as other servers log it."""

_FREQUENT: Final = frozenset({"/healthz", "/readyz", "/metrics"})
"""Routes whose requests are logged at level DEBUG."""

_REQUESTS = counter(
    "turnstream_gateway_http_requests",
    "Answered requests, by the template of their route.",
    ["method", "route", "status"],
)
_SECONDS = histogram(
    "turnstream_gateway_http_request_seconds",
    "Duration of a request, with the time for which it was held.",
    ["method", "route"],
)
_BYTES = counter("turnstream_gateway_http_received_bytes", "Bytes of the bodies of requests.")


class ObservedApp:
    """An application whose requests are observed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A body that is no HTTP ends the connection in this turn of the loop: no answer can follow.
        await asyncio.sleep(0)
        headers = Headers(scope=scope)
        exchange = _Exchange(receive, send, request_id=_request_id(headers))
        traceparent = headers.get("traceparent", "")
        with bound(request_id=exchange.request_id), span("http", traceparent=traceparent) as made:
            try:
                await self._app(scope, exchange.receive, exchange.send)
            finally:
                route = route_of(scope)
                _record(scope, exchange, route=route)
                if made is not None:
                    made.update_name(f"{scope['method']} {route}")
                    made.set_attribute("http.response.status_code", exchange.status)


class _Exchange:
    """One request and its answer, with what is measured of them."""

    def __init__(self, receive: Receive, send: Send, *, request_id: str) -> None:
        self.request_id = request_id
        self.status = _DISCONNECTED
        self.num_bytes = 0
        self.began_s = time.monotonic()
        self._receive = receive
        self._send = send

    async def receive(self) -> Message:
        """Return the next message of the request."""
        message = await self._receive()
        self.num_bytes += len(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        """Send a message of the answer; the first one has the id of the request."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)[REQUEST_ID] = self.request_id
        await self._send(message)


def route_of(scope: Scope) -> str:
    """Return the template of the route of an answered request, such as `/v1/runs/{run}`."""
    # The route of newer releases of FastAPI lacks the prefix of its router, and the context has it.
    route = scope.get("fastapi", {}).get("effective_route_context") or scope.get("route")
    path: str | None = getattr(route, "path", None)
    if path is None:
        return _NO_ROUTE
    return scope.get("root_path", "").removeprefix(scope.get("app_root_path", "")) + path


def _record(scope: Scope, exchange: _Exchange, *, route: str) -> None:
    method = scope["method"] if scope["method"] in _METHODS else "other"
    duration_s = time.monotonic() - exchange.began_s
    _REQUESTS.labels(method, route, str(exchange.status)).inc()
    _SECONDS.labels(method, route).observe(duration_s)
    _BYTES.inc(exchange.num_bytes)
    # The path itself may have a secret in it, such as the token of a download.
    facts: dict[str, Any] = {"status": exchange.status, "duration_s": round(duration_s, 6)}
    facts |= {"bytes": exchange.num_bytes}
    if run := scope.get("path_params", {}).get("run"):
        facts["run"] = path_run(run)
    level = logging.DEBUG if route in _FREQUENT else logging.INFO
    logger.log(level, "%s %s", method, route, extra=facts)


def _request_id(headers: Headers) -> str:
    given = headers.get(REQUEST_ID, "")
    return given if _ACCEPTED.fullmatch(given) else secrets.token_hex(16)
