"""Authentication of requests, and the owner that a key stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import redis.asyncio
from fastapi import Depends, HTTPException, Request

from turnstream_server.commands.models import ModelRecord
from turnstream_server.commands.owners import owner_of
from turnstream_server.commands.samplers import SamplerRecord
from turnstream_server.commands.sessions import Session
from turnstream_server.gateway.state import Gateway

_PREFIX: Final = "tml-"
_BEARER: Final = "bearer "


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The owner of a request, with what belongs to this owner.

    Things of another owner are as absent as those that never existed.
    """

    owner: str
    gateway: Gateway

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


async def authenticate(request: Request) -> Caller:
    """Return the caller of a request; 401 without an accepted key."""
    gateway: Gateway = request.app.state.gateway
    key = _key(request)
    if not key.startswith(_PREFIX):
        raise HTTPException(401, f"the header X-API-Key has no key that begins with {_PREFIX}")
    # Hashes are compared: the time of a comparison shows nothing of a key.
    owner = owner_of(key)
    if gateway.owners and owner not in gateway.owners:
        raise HTTPException(401, "the key in the header X-API-Key is not accepted")
    return Caller(owner=owner, gateway=gateway)


Authenticated = Annotated[Caller, Depends(authenticate)]


def _key(request: Request) -> str:
    key = request.headers.get("x-api-key")
    if key is not None:
        return key
    authorization = request.headers.get("authorization", "")
    if authorization.lower().startswith(_BEARER):
        return authorization[len(_BEARER) :].strip()
    return ""
