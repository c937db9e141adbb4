"""The client's settings, its session, and what the service offers."""

from __future__ import annotations

import secrets
from typing import Any, Final

from fastapi import APIRouter, HTTPException
from fastapi.responses import Response
from pydantic import Field, StrictStr

from turnstream.errors import EndOfRunError
from turnstream_server.gateway.bodies import Body, json_response
from turnstream_server.gateway.descriptions import Limit, Offset, text_values
from turnstream_server.gateway.tinker.json_parts import Part, read_fields
from turnstream_server.gateway.tinker_caller import Authenticated
from turnstream_server.operations.keys import MODEL_ID
from turnstream_server.operations.sessions import (
    Session,
    beat,
    finish_session,
    members_of,
    open_session,
    sessions_of,
)

public = APIRouter()
"""Routes without a key."""

router = APIRouter()

_ID_BYTES: Final = 12
_LONGEST_REASON: Final = 1_000


class _NewSession(Part):
    tags: list[StrictStr] = Field(default_factory=list)
    user_metadata: dict[str, Any] | None = None
    sdk_version: StrictStr = ""
    display_name: StrictStr | None = None


class _SessionId(Part):
    session_id: StrictStr


class _Reason(Part):
    type: StrictStr = "success"


class _End(Part):
    reason: _Reason = _Reason()
    detail: StrictStr | None = None


@public.get("/healthz")
async def healthz() -> Response:
    """Report that this process answers."""
    return json_response({"status": "ok"})


@router.post("/client/config")
async def client_config(caller: Authenticated) -> Response:
    """Return settings of the client."""
    return json_response({"parallel_fwdbwd_chunks": True})


@router.post("/client/dynamic_config")
async def dynamic_config(caller: Authenticated) -> Response:
    """Return settings that the client reads again from time to time."""
    return json_response(
        {
            "refresh_interval_sec": 300,
            "sample_cancel_enabled": False,
            "sample_cancel_max_batch_size": 64,
        }
    )


@router.post("/telemetry")
async def telemetry(caller: Authenticated) -> Response:
    """Accept events of a client, and drop them."""
    return json_response({"status": "accepted"})


@router.get("/get_server_capabilities")
async def capabilities(caller: Authenticated) -> Response:
    """Return the served base models."""
    served = await caller.gateway.bases.served()
    models = [
        {
            "model_name": each.name,
            "max_context_length": each.context_length,
            "trainable": True,
            "sampleable": True,
        }
        for each in served.values()
    ]
    return json_response({"supported_models": models})


@router.post("/create_session")
async def create_session(body: Body, caller: Authenticated) -> Response:
    """Open a session."""
    sent = read_fields(body, _NewSession)
    session = Session(secrets.token_hex(_ID_BYTES), caller.owner, **dict(sent))
    await open_session(caller.client, session)
    return json_response({"type": "create_session", "session_id": session.session_id})


@router.post("/session_heartbeat")
async def heartbeat(body: Body, caller: Authenticated) -> Response:
    """Keep a session open; 410 for a closed one, which ends the heartbeats of its client."""
    session_id = read_fields(body, _SessionId).session_id
    await caller.session(session_id)
    try:
        await beat(caller.client, session_id)
    except EndOfRunError as error:
        raise HTTPException(410, str(error)) from error
    return json_response({"type": "session_heartbeat"})


@router.post("/sessions/{session_id}/finish")
async def finish(session_id: str, body: Body, caller: Authenticated) -> Response:
    """Refuse further work of a session. Its results stay a while; the first reason stays."""
    sent = read_fields(body, _End)
    await caller.session(session_id)
    reason = f"{sent.reason.type}: {sent.detail}" if sent.detail else sent.reason.type
    await finish_session(caller.client, session_id, reason=reason[:_LONGEST_REASON])
    return json_response({})


@router.get("/sessions")
async def list_sessions(caller: Authenticated, limit: Limit = 20, offset: Offset = 0) -> Response:
    """Return a page of the ids of the caller's sessions, the newest first."""
    every = await sessions_of(caller.client, caller.owner)
    return json_response({"sessions": every[offset : offset + limit]})


@router.get("/sessions/{session_id}")
async def describe(session_id: str, caller: Authenticated) -> Response:
    """Return the models and sampling sessions of a session."""
    session = await caller.session(session_id)
    members = await members_of(caller.client, session_id)
    models = [each for each in members if MODEL_ID.fullmatch(each)]
    return json_response(
        {
            "training_run_ids": models,
            "sampler_ids": [each for each in members if each not in models],
            "user_metadata": text_values(session.user_metadata),
            "display_name": session.display_name,
        }
    )
