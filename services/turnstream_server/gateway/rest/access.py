"""The caller of a request of the REST API: `Produce`, `Train`, `Read` or `Admin` as a parameter.

    @router.get("/runs/{run}/ledger")
    async def ledger(run: RunName, caller: Read) -> Ledger: ...

The key must have the role, and may be bound to some runs: then the path parameter `run` must be one
of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, NamedTuple

import redis.asyncio
from fastapi import Depends, Path, Request, Security
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer

from turnstream_server.gateway.access import identify
from turnstream_server.gateway.state import Gateway
from turnstream_server.keys.records import ApiKey, Role

RunName = Annotated[
    str, Path(min_length=1, max_length=384, description="Name of a run.", examples=["demo"])
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

    None accepts every key: the route checks the role.

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
        key = await identify(request)  # it reads the same headers
        if role is not None:
            key.require(role, run=request.path_params.get("run"))
        return Caller(key, gateway)

    return caller


Produce = Annotated[Caller, Depends(needs("produce"))]
Train = Annotated[Caller, Depends(needs("train"))]
Read = Annotated[Caller, Depends(needs("read"))]
Admin = Annotated[Caller, Depends(needs("admin"))]
Known = Annotated[Caller, Depends(needs(None))]
