"""The application below `/v1`, with its OpenAPI document, `/v1/ping` and `/v1/batchers`."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any, Final

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from turnstream.errors import TurnstreamError
from turnstream.http.problems import WIRE_VERSION
from turnstream.store.client.replies import translating
from turnstream.store.run.batchers import list_batchers
from turnstream.types.names import quoted
from turnstream_server.gateway.bodies import disconnected
from turnstream_server.gateway.rest.bodies import JSON
from turnstream_server.gateway.rest.caller import EntryApp, Known, Train, refuse_unknown_query
from turnstream_server.gateway.rest.generators import route
from turnstream_server.gateway.rest.ingest import rewards, routes
from turnstream_server.gateway.rest.ingest.routes import add_ingest_state
from turnstream_server.gateway.rest.problems import (
    MEDIA_TYPE,
    Problem,
    invalid_request,
    problem_of,
    response,
)
from turnstream_server.gateway.rest.runs import events, reads, runs, sessions, tasks, versions
from turnstream_server.gateway.state import Gateway
from turnstream_server.telemetry.instruments import count_error

logger = logging.getLogger(__name__)

PREFIX: Final = "/v1"

router = APIRouter(tags=["service"])

ROUTERS: Final[tuple[APIRouter, ...]] = (
    router,
    runs.router,
    routes.router,
    tasks.router,
    sessions.router,
    rewards.router,
    reads.router,
    versions.router,
    events.router,
    route.router,
)

_STATUSES: Final = (400, 401, 403, 404, 409, 410, 413, 422, 429, 503)
_PROBLEMS: Final[dict[int | str, dict[str, Any]]] = {
    status: {
        "model": Problem,
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        "description": "A problem document.",
    }
    for status in _STATUSES
}


def make_rest_app(gateway: Gateway) -> FastAPI:
    """Return the application; it is mounted at `PREFIX`."""
    app = FastAPI(
        title="Turnstream",
        summary="The data service between LLM rollouts and training.",
        version="1",
        responses=_PROBLEMS,
        openapi_url=None,  # its route makes the document again for each request
        docs_url=None,  # its page loads scripts from another server
        redoc_url=None,
    )
    app.router.redirect_slashes = False
    app.state.gateway = gateway
    add_ingest_state(app, gateway)
    route.add_generator_state(app, gateway)
    events.add_event_state(app)
    for router in ROUTERS:
        app.include_router(router, dependencies=[Depends(refuse_unknown_query)])
    app.add_route("/openapi.json", _Document(app).get, methods=["GET"])
    app.add_middleware(EntryApp)
    app.add_exception_handler(TurnstreamError, _refuse)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, disconnected)
    app.add_exception_handler(Exception, _failed)
    return app


class Pong(BaseModel):
    """The gateway, its store and the key of the request are in order."""

    wire_version: int = Field(description="Highest version of `Turnstream-Wire`.", examples=[1])


class Batchers(BaseModel):
    """Batchers that are registered in the store."""

    batchers: list[str] = Field(
        description='gRPC addresses, the last registered first: "host:port", or '
        '"grpcs://host:port" with TLS.',
        examples=[["10.0.0.7:7600"]],
    )


@router.get("/ping", response_model=Pong, summary="Check the connection")
async def get_ping(caller: Known) -> Pong:
    """Check the key, and that the store answers. A key of any role may ask."""
    with translating():
        await caller.client.ping()
    return Pong(wire_version=WIRE_VERSION)


@router.get("/batchers", response_model=Batchers, summary="List batchers")
async def get_batchers(caller: Train) -> Response:
    """Return the addresses of all batchers; empty while none is registered."""
    return await caller.answer(Batchers, lambda client: Batchers(batchers=list_batchers(client)))


class _Document:
    """The OpenAPI document of an application, which is made once, in a thread."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._making: asyncio.Task[bytes] | None = None

    async def get(self, _: Request) -> Response:
        """Return the document. It needs no key."""
        if self._making is None:
            self._making = asyncio.create_task(asyncio.to_thread(self._made))
        return Response(await asyncio.shield(self._making), media_type=JSON)

    def _made(self) -> bytes:
        document = {**self._app.openapi(), "servers": [{"url": PREFIX}]}
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


async def _refuse(_: Request, error: Exception) -> Response:
    count_error(type(error), service="gateway")
    return response(problem_of(error))


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return response(invalid_request(error))


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    title = str(error.detail)
    if error.status_code == 404:
        detail = f"no route has the path {quoted(request.scope['path'])}"
    else:
        detail = title
    problem = Problem(type="about:blank", title=title, status=error.status_code, detail=detail)
    answer = response(problem)
    answer.headers.update(error.headers or {})
    return answer


async def _failed(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return response(problem_of(error))
