"""Authentication of requests, and the owner that a key stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import redis.asyncio
from fastapi import Depends, HTTPException, Request

from turnstream.errors import AccessDeniedError, UnknownKeyError
from turnstream_server.gateway.state import Gateway
from turnstream_server.keys.checks import key_of, secret_of
from turnstream_server.keys.records import PREFIX, ApiKey
from turnstream_server.operations.models import ModelRecord
from turnstream_server.operations.samplers import SamplerRecord
from turnstream_server.operations.sessions import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerCaller:
    """The owner of a request, with what belongs to this owner.

    Things of another owner are as absent as those that never existed.
    """

    owner: str
    gateway: Gateway
    key: ApiKey

    @property
    def client(self) -> redis.asyncio.Redis:
        """Return the client of the store."""
        return self.gateway.client

    async def session(self, session_id: str) -> Session:
        """Return a session; RunNotFoundError if there is none."""
        return await self.gateway.session(self.owner, session_id)

    async def open_session(self, session_id: str) -> Session:
        """Return a session that takes work; EndOfRunError for a closed one."""
        return await self.gateway.open_session(self.owner, session_id)

    async def model(self, model_id: str) -> ModelRecord:
        """Return a model; RunNotFoundError if there is none."""
        return await self.gateway.model(self.owner, model_id)

    async def sampler(self, sampler_id: str) -> SamplerRecord:
        """Return a sampling session; RunNotFoundError if there is none."""
        return await self.gateway.sampler(self.owner, sampler_id)


async def authenticate(request: Request) -> TinkerCaller:
    """Return the caller of a request; 401 without an accepted key, 403 without the role."""
    gateway: Gateway = request.app.state.gateway
    secret = secret_of(request.headers)
    if not secret.startswith(PREFIX):
        raise HTTPException(401, f"the header X-API-Key has no key that begins with {PREFIX}")
    try:
        key = key_of(request.scope)
        key.require("train")
    except AccessDeniedError as error:
        status = 401 if isinstance(error, UnknownKeyError) else 403
        raise HTTPException(status, str(error)) from error
    return TinkerCaller(owner=key.owner, gateway=gateway, key=key)


Authenticated = Annotated[TinkerCaller, Depends(authenticate)]
