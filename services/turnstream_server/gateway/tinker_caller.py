"""Authentication of requests, and the owner that a key stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import redis.asyncio
from fastapi import Depends, HTTPException, Request

from turnstream.errors import AccessDeniedError, RunNotFoundError, UnknownKeyError
from turnstream_server.gateway.state import Gateway, keep
from turnstream_server.keys.records import PREFIX, ApiKey, Role, key_of, secret_of
from turnstream_server.operations.checkpoints import (
    CheckpointPath,
    SavedCheckpoint,
    checkpoints_of,
    read_checkpoint,
    read_shared,
)
from turnstream_server.operations.keys import MODEL_ID, SAMPLER_ID, RequestId
from turnstream_server.operations.models import ModelRecord, read_model_async
from turnstream_server.operations.samplers import SamplerRecord, read_sampler
from turnstream_server.operations.sessions import Session, read_session


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
        session = await read_session(self.client, session_id)
        if session.owner != self.owner:
            raise RunNotFoundError(f"there is no session {session_id!r}")
        return session

    async def open_session(self, session_id: str) -> Session:
        """Return a session that takes work; EndOfRunError for a closed one."""
        return (await self.session(session_id)).require_open()

    async def model(self, model_id: str) -> ModelRecord:
        """Return a model; RunNotFoundError if there is none.

        Its `last_request_ms` and `ended` may be old.
        """
        record = self.gateway.models.get(model_id)
        if record is None and MODEL_ID.fullmatch(model_id):
            record = await read_model_async(self.client, model_id)
            keep(self.gateway.models, model_id, record)
        if record is None or record.owner != self.owner:
            raise RunNotFoundError(f"there is no model {model_id!r}")
        return record

    async def sampler(self, sampler_id: str) -> SamplerRecord:
        """Return a sampling session; RunNotFoundError if there is none."""
        record = None
        if SAMPLER_ID.fullmatch(sampler_id):
            record = await read_sampler(self.client, sampler_id)
            keep(self.gateway.sampler_owners, sampler_id, record.owner)
        if record is None or record.owner != self.owner:
            raise RunNotFoundError(f"there is no sampling session {sampler_id!r}")
        return record

    async def checkpoint(self, path: CheckpointPath) -> SavedCheckpoint:
        """Return a checkpoint; RunNotFoundError if there is none."""
        return await self.gateway.threads.run(
            lambda client: read_checkpoint(client, self.owner, path)
        )

    async def shared_checkpoint(self, path: CheckpointPath) -> SavedCheckpoint:
        """Return a checkpoint, also a published one; RunNotFoundError if there is none."""
        return await self.gateway.threads.run(lambda client: read_shared(client, self.owner, path))

    async def checkpoints(self, model_id: str | None = None) -> list[SavedCheckpoint]:
        """Return all checkpoints, or those of a model, the oldest first."""
        return await self.gateway.threads.run(
            lambda client: checkpoints_of(client, self.owner, model_id=model_id)
        )

    async def require_target(self, request_id: RequestId) -> None:
        """Raise RunNotFoundError unless the model or sampling session of a request is there."""
        target = request_id.target
        if not request_id.is_sample:
            await self.model(target)
        elif self.gateway.sampler_owners.get(target) != self.owner:
            await self.sampler(target)


async def authenticate(request: Request) -> TinkerCaller:
    """Return the caller of a request; 401 without an accepted key, 403 without the role."""
    gateway: Gateway = request.app.state.gateway
    secret = secret_of(request.headers)
    if not secret.startswith(PREFIX):
        raise HTTPException(401, f"the header X-API-Key has no key that begins with {PREFIX}")
    key = require_role(request, "train")
    return TinkerCaller(owner=key.owner, gateway=gateway, key=key)


def require_role(request: Request, role: Role) -> ApiKey:
    """Return the key of a request; 401 without an accepted key, 403 without the role."""
    try:
        key = key_of(request.scope)
        key.require(role)
    except AccessDeniedError as error:
        status = 401 if isinstance(error, UnknownKeyError) else 403
        raise HTTPException(status, str(error)) from error
    return key


Authenticated = Annotated[TinkerCaller, Depends(authenticate)]
