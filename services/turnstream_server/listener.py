"""The HTTP server beside a service: /metrics, /healthz and /readyz.

It runs in a thread of its own, so that it answers while the service is busy or waits.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from typing import Final

from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from turnstream.errors import TurnstreamError
from turnstream_server.http_server import HttpServer
from turnstream_server.keys.records import secret_of
from turnstream_server.telemetry.instruments import REGISTRY
from turnstream_server.telemetry.readiness import Readiness
from turnstream_server.tls import Tls

logger = logging.getLogger(__name__)

OPTION: Final = "--metrics-listen"

ReadKey = Callable[[], str]


def serve_metrics(
    host: str,
    port: int,
    *,
    readiness: Readiness,
    read_key: ReadKey | None = None,
    tls: Tls | None = None,
) -> HttpServer:
    """Serve metrics and health until the server is closed.

    `read_key` returns the key that /metrics needs; None if it needs none. The other arguments and
    the errors are those of `HttpServer`.
    """
    app = _metrics_app(readiness, read_key)
    server = HttpServer(app, host, port, option=OPTION, tls=tls, is_brief=True)
    logger.info("metrics are served", extra={"url": f"{server.url}/metrics"})
    return server


def _metrics_app(readiness: Readiness, read_key: ReadKey | None) -> Starlette:
    # Functions without `async` run in threads: both of them may wait for the store.
    def metrics(request: Request) -> Response:
        if read_key is not None and not _is_allowed(secret_of(request.headers), read_key):
            detail = "the request has no accepted key: send it as X-API-Key or bearer"
            return JSONResponse({"detail": detail}, 401, {"WWW-Authenticate": "Bearer"})
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(REGISTRY), media_type=content_type)

    def readyz(_: Request) -> Response:
        status, body = readiness.answer()
        return Response(body, status, media_type="application/json")

    async def healthz(_: Request) -> Response:
        return JSONResponse({"alive": True})

    app = Starlette(
        routes=[Route("/metrics", metrics), Route("/readyz", readyz), Route("/healthz", healthz)],
        middleware=[Middleware(GZipMiddleware)],
    )
    app.router.redirect_slashes = False
    return app


def _is_allowed(secret: str, read_key: ReadKey) -> bool:
    try:
        key = read_key()
    except TurnstreamError as error:
        logger.warning("metrics are refused: %s", error)
        return False
    return bool(key) and hmac.compare_digest(secret.encode(), key.encode())
