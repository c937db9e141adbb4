"""The caller of a request of the REST API: `Produce`, `Train`, `Read` or `Admin` as a parameter.

    @router.get("/runs/{run}/ledger")
    async def ledger(run: RunName, caller: Read) -> Ledger: ...

The key must have the role, and may be bound to some runs: then the path parameter `run` must be one
of them. All routes have `refuse_unknown_query` too.
"""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable
from typing import Annotated, Final, NamedTuple

import redis.asyncio
from fastapi import Depends, Path, Request, Security
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from pydantic import AfterValidator, BeforeValidator

from turnstream_server.gateway.rest.run_paths import path_run, with_slashes
from turnstream_server.gateway.state import Gateway
from turnstream_server.keys.checks import key_of
from turnstream_server.keys.records import ApiKey, Role

MAX_RUN_LENGTH: Final = 512
"""Characters of a name; its encoded form has no more."""

RunName = Annotated[
    str,
    Path(
        min_length=1,
        max_length=MAX_RUN_LENGTH + 16,  # the number of an id
        description="Name of a run, or its id. `demo~2` is the id of the second run with the name "
        "`demo`, and `demo~1` that of the first. A `/` of the name is `%2F`.",
        examples=["demo"],
    ),
    BeforeValidator(with_slashes),  # before the check for valid Unicode
    AfterValidator(path_run),
]

_HEADER = APIKeyHeader(name="X-API-Key", auto_error=False)
_BEARER = HTTPBearer(auto_error=False)


class Caller(NamedTuple):
    """Who asks.

    Attributes:
        key: roles, runs and limits of the caller.
        gateway: the state of the process.
    """

    key: ApiKey
    gateway: Gateway

    @property
    def client(self) -> redis.asyncio.Redis:
        """Return the client of the store."""
        return self.gateway.client


def needs(role: Role | None) -> Callable[..., Awaitable[Caller]]:
    """Return a dependency that returns the caller of a request, if its key has the role.

    None accepts every role.

    Raises:
        UnknownKeyError: no key, or one that is not accepted.
        AccessDeniedError: the key does not have the role, or may not use the run.
    """

    async def caller(
        request: Request,
        header: Annotated[str | None, Security(_HEADER)] = None,
        bearer: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)] = None,
    ) -> Caller:
        gateway: Gateway = request.app.state.gateway
        key = key_of(request.scope)  # its headers are the same
        part = request.path_params.get("run")
        run = None if part is None else path_run(part)
        if role is not None:
            key.require(role)
        key.require_run(run)
        return Caller(key, gateway)

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
