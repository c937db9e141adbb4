"""The application: routes below `/api/v1`, and the status of each error.

The client repeats 408, 409, 429 and 5xx, for minutes or without end. So an error of the caller is
400, 401, 403, 404, 410 or 422, and only an outage is 503.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Final

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import ClientDisconnect
from starlette.routing import Mount

from turnstream.errors import (
    AccessDeniedError,
    BatchingError,
    ConflictError,
    EndOfRunError,
    RecordError,
    RunNotFoundError,
    UnavailableError,
)
from turnstream.types.names import quoted
from turnstream_server.gateway.bodies import disconnected, json_response
from turnstream_server.gateway.proxy.engines import Engines
from turnstream_server.gateway.proxy.routes import make_proxy_apps
from turnstream_server.gateway.rest.app import PREFIX as REST_PREFIX
from turnstream_server.gateway.rest.app import make_rest_app
from turnstream_server.gateway.routes import (
    downloads,
    futures,
    models,
    sampling,
    sessions,
    training,
)
from turnstream_server.gateway.routes import training_runs as runs
from turnstream_server.gateway.state import Gateway
from turnstream_server.gateway.tinker_caller import authenticate, require_role
from turnstream_server.telemetry.instruments import REGISTRY, count_error

logger = logging.getLogger(__name__)

router = APIRouter()

PREFIX: Final = "/api/v1"

_GROUPS: Final = (futures, sampling, training, sessions, models, downloads, runs)
"""Routes are searched in this order."""

_STATUSES: Final[dict[type[Exception], int]] = {
    BatchingError: 400,
    RecordError: 400,
    ConflictError: 400,
    EndOfRunError: 400,
    AccessDeniedError: 403,
    RunNotFoundError: 404,
    UnicodeEncodeError: 400,  # an id with half a surrogate pair
}


def make_app(gateway: Gateway, engines: Engines | None = None) -> FastAPI:
    """Return the application; without engines, model calls of agents are refused."""
    app = FastAPI(openapi_url=None)  # its pages would need no key
    app.router.redirect_slashes = False
    app.state.gateway = gateway
    for group in _GROUPS:
        app.include_router(group.router, prefix=PREFIX, dependencies=[Depends(authenticate)])
    for group in (sessions, downloads):
        app.include_router(group.public, prefix=PREFIX)
    app.include_router(router)
    rest = make_rest_app(gateway)
    app.router.routes.append(_mount(REST_PREFIX, rest))
    proxies = make_proxy_apps(gateway, engines or Engines(()), rest.state.publishers)
    for prefix, proxy in proxies.items():
        app.router.routes.append(_mount(prefix, proxy))
    for kind in _STATUSES:
        app.add_exception_handler(kind, _refuse)
    app.add_exception_handler(UnavailableError, _unavailable)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ClientDisconnect, disconnected)
    app.add_exception_handler(Exception, _failed)
    return app


@router.get("/healthz")
async def healthz() -> Response:
    """Return that the process lives. It needs no key."""
    return json_response({"alive": True})


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """Return the state of the dependencies; 503 if a needed one is not ready. It needs no key."""
    gateway: Gateway = request.app.state.gateway
    status, body = await asyncio.to_thread(gateway.options.readiness.answer)
    return Response(body, status, media_type="application/json")


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the metrics of this process for Prometheus; the key needs the role `read`."""
    require_role(request, "read")
    shown = await asyncio.to_thread(generate_latest, REGISTRY)
    return Response(shown, media_type=CONTENT_TYPE_LATEST)


def _mount(prefix: str, app: FastAPI) -> Mount:
    """Return the route to an application, for paths with a line break too."""
    mount = Mount(prefix, app)
    mount.path_regex = re.compile(mount.path_regex.pattern, re.DOTALL)
    return mount


async def _refuse(_: Request, error: Exception) -> Response:
    count_error(type(error), service="gateway")
    status = next(code for kind, code in _STATUSES.items() if isinstance(error, kind))
    return json_response({"detail": str(error)}, status=status)


async def _unavailable(request: Request, error: Exception) -> Response:
    count_error(type(error), service="gateway")
    if _is_poll(request):  # a client repeats any other status at once
        return json_response({"type": "try_again", "queue_state": "active"}, status=408)
    logger.warning("%s: %s", request.url.path, error)
    return json_response({"detail": str(error)}, status=503)


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    detail = f"{field}: {first['msg'].lower()}, got {quoted(first.get('input'))}"
    return json_response({"detail": detail}, status=422)


async def _failed(request: Request, error: Exception) -> Response:
    """Answer for an error of our own; the server logs it."""
    detail = f"internal error: {type(error).__name__}"
    if _is_poll(request):
        return json_response({"error": detail, "category": "server"})
    return json_response({"detail": detail}, status=500)


def _is_poll(request: Request) -> bool:
    return request.url.path == f"{PREFIX}/retrieve_future"
