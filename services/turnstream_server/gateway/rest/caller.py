"""Every request below `/v1` before its route: its wire version, its run, and its caller.

    @router.get("/runs/{run}/ledger")
    async def ledger(run: RunName, caller: Read) -> Response: ...

The key must have the role that the annotation names, and may be bound to some runs: then the path
parameter `run` must be one of them. All routes have `refuse_unknown_query` too.

`/v1/runs/maze` is the run that has this name now. `/v1/runs/maze~2` is the second run of the name,
and `/v1/runs/maze~1` the first one, also after its deletion. A server decodes the path before it
finds the route, so a `/` of the name would separate two parts of the path. `EntryApp` puts `SLASH`
in its place, and `path_run` the `/` again.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import unquote

import redis
import redis.asyncio
from fastapi import Depends, Path, Request, Security
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from pydantic import AfterValidator, BeforeValidator, TypeAdapter
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnstream.http.problems import HEADER, WIRE_PROBLEM, WIRE_VERSION
from turnstream.types.names import RunId
from turnstream_server.gateway.rest.bodies import JSON
from turnstream_server.gateway.rest.problems import Problem, problem_type, response
from turnstream_server.gateway.state import Gateway
from turnstream_server.keys.records import ApiKey, Role, key_of

SLASH: Final = "\udc2f"
"""Half a surrogate pair, which no name can have."""

_RUN: Final = 3
"""Place of the run among the parts of a raw path: `/v1/runs/<run>`."""

MAX_RUN_LENGTH: Final = 512
"""Characters of a name; its encoded form has no more."""

_HEADER = APIKeyHeader(name="X-API-Key", auto_error=False)
_BEARER = HTTPBearer(auto_error=False)


class EntryApp:
    """An application that refuses requests of an unknown version, and names its own in answers.

    Its routes receive the encoded slashes in the name of a run as `SLASH`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; 400 for one of another version."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def versioned(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = str(WIRE_VERSION)
            await send(message)

        raw: bytes = scope.get("raw_path") or b""
        if b"%2f" in raw.lower():
            scope = {**scope, "path": decoded_path(raw)}
        text = refused_version(Headers(scope=scope).get(HEADER))
        app = response(_refusal(text)) if text else self._app
        await app(scope, receive, versioned)


def refused_version(text: str | None) -> str:
    """Return why a gateway refuses the version in a header; "" where it accepts it.

    >>> refused_version("1"), refused_version(None)
    ('', '')
    >>> refused_version("7")
    "Turnstream-Wire is '7', and this gateway knows 1: install the same release on both sides"
    """
    if text is None or (text.isascii() and text.isdecimal() and 1 <= int(text) <= WIRE_VERSION):
        return ""
    known = f"{WIRE_VERSION}" if WIRE_VERSION == 1 else f"1 to {WIRE_VERSION}"
    return (
        f"{HEADER} is {text[:20]!r}, and this gateway knows {known}: install the same release on "
        "both sides"
    )


def _refusal(text: str) -> Problem:
    title = "The version of the request is unknown"
    return Problem(type=problem_type(WIRE_PROBLEM), title=title, status=400, detail=text)


def decoded_path(raw: bytes) -> str:
    """Return a path in which the encoded slashes of the run are `SLASH`.

    >>> decoded_path(b"/v1/runs/a%2Fb/trajectories/c%2Fd/0").replace(SLASH, "|")
    '/v1/runs/a|b/trajectories/c/d/0'
    """
    parts = [unquote(part.decode("ascii")) for part in raw.split(b"/")]
    if len(parts) > _RUN and parts[_RUN - 1] == "runs":
        parts[_RUN] = parts[_RUN].replace("/", SLASH)
    return "/".join(parts)


def _with_slashes(part: str) -> str:
    return part.replace(SLASH, "/")


def path_run(part: str) -> str:
    """Return the name in a part of a path; a RunId for the id of one run.

    >>> path_run("a" + SLASH + "b"), path_run("maze"), path_run("maze~1"), path_run("maze~2")
    ('a/b', 'maze', 'maze', 'maze~2')
    >>> type(path_run("maze")).__name__, type(path_run("maze~1")).__name__
    ('str', 'RunId')
    """
    text = _with_slashes(part)
    name = text.removesuffix("~1")
    if name and name != text:
        return RunId.of(name, 1)
    run = RunId(text)
    return run if run.incarnation > 1 else text


RunName = Annotated[
    str,
    Path(
        min_length=1,
        max_length=MAX_RUN_LENGTH + 16,  # the number of an id
        description="Name of a run, or its id. `demo~2` is the id of the second run with the name "
        "`demo`, and `demo~1` that of the first. A `/` of the name is `%2F`.",
        examples=["demo"],
    ),
    BeforeValidator(_with_slashes),  # before the check for valid Unicode
    AfterValidator(path_run),
]


class Caller(NamedTuple):
    """The key of a request, and the state of the process."""

    key: ApiKey
    gateway: Gateway

    @property
    def client(self) -> redis.asyncio.Redis:
        """Return the client of the store."""
        return self.gateway.client

    async def answer(
        self, kind: type[Any], read: Callable[[redis.Redis], Any], *, status: int = 200
    ) -> Response:
        """Return a result of the store as a response, checked as this kind, all in a thread."""

        def encoded(client: redis.Redis) -> bytes:
            content = _adapter(kind)
            return content.dump_json(content.validate_python(read(client)))

        return Response(await self.gateway.threads.run(encoded), status, media_type=JSON)


@functools.cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def needs(role: Role | None) -> Callable[..., Awaitable[Caller]]:
    """Return a dependency that returns the caller of a request; None accepts every role.

    UnknownKeyError for a key that is not accepted, AccessDeniedError for another role or run.
    """

    async def caller(
        request: Request,
        header: Annotated[str | None, Security(_HEADER)] = None,
        bearer: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)] = None,
    ) -> Caller:
        key = key_of(request.scope)  # its headers are the same
        part = request.path_params.get("run")
        if role is not None:
            key.require(role)
        key.require_run(None if part is None else path_run(part))
        return Caller(key, request.app.state.gateway)

    return caller


Produce = Annotated[Caller, Depends(needs("produce"))]
Train = Annotated[Caller, Depends(needs("train"))]
Read = Annotated[Caller, Depends(needs("read"))]
Admin = Annotated[Caller, Depends(needs("admin"))]
Known = Annotated[Caller, Depends(needs(None))]
"""A caller with any role, for reads that a generator, a trainer and an operator make."""


async def refuse_unknown_query(request: Request) -> None:
    """Raise RequestValidationError for a query parameter that the route has not declared.

    A filter with a typing error would otherwise be ignored.
    """
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    known = _names(route.dependant)
    for name in request.query_params:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1) or sorted(known)
            names = f"known: {', '.join(near)}" if near else "this route has none"
            problem = {
                "type": "extra_forbidden",
                "loc": ("query", name),
                "msg": f"it is no query parameter of this route; {names}",
                "input": request.query_params[name],
            }
            raise RequestValidationError([problem])


def _names(dependant: Dependant) -> list[str]:
    """Return the query parameters of a route and of its dependencies."""
    own = [each.alias for each in dependant.query_params]
    return own + [name for each in dependant.dependencies for name in _names(each)]
