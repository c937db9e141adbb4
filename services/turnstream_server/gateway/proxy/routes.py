"""Routes of agents: `/openai/v1/...` and `/anthropic/v1/...` with a session key.

`/t/{run}/{group}/{sample}/v1/...` has the routes of `/openai/v1/...` for API keys. `session` and
`session/end` are our own routes, all others are those of OpenAI and Anthropic.
"""

from __future__ import annotations

import functools
import json
import logging
from typing import Annotated, Any, Final, cast
from urllib.parse import unquote

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import Response
from pydantic import StrictStr
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from turnstream.errors import (
    AccessDeniedError,
    InvalidTurnError,
    RecordError,
    TurnstreamError,
)
from turnstream.generator.encode.group_checks import checked_key
from turnstream.store.client.run_ids import find_run_async
from turnstream.types import TrajectoryKey
from turnstream.types.names import quoted
from turnstream_server.gateway.bodies import LargeBody, disconnected, json_response
from turnstream_server.gateway.proxy.anthropic_api import chat_of_message, listed_models
from turnstream_server.gateway.proxy.engines import Engines
from turnstream_server.gateway.proxy.errors import (
    ANTHROPIC,
    openai_error,
    openai_error_of,
    shaped_for,
)
from turnstream_server.gateway.proxy.live_answers import Answer
from turnstream_server.gateway.proxy.model_calls import Api, ModelCall
from turnstream_server.gateway.proxy.recorder import Recorder
from turnstream_server.gateway.proxy.responses_api import chat_of_response
from turnstream_server.gateway.rest.bodies import parse_body
from turnstream_server.gateway.rest.caller import SLASH, path_run
from turnstream_server.gateway.rest.ingest.json_bodies import SealFields
from turnstream_server.gateway.rest.ingest.publishers import Publishers
from turnstream_server.gateway.rest.ingest.writes import seal_of
from turnstream_server.gateway.state import Gateway
from turnstream_server.keys.limits import release_place
from turnstream_server.keys.records import key_of
from turnstream_server.keys.sessions import SESSION, Session
from turnstream_server.telemetry.instruments import count_error

KEY_PREFIX: Final = "/openai"
"""First part of the paths of the API of OpenAI for session keys."""

PATH_PREFIX: Final = "/t"
"""First part of the paths that name a trajectory, for API keys."""

_RETRIES: Final = "x-stainless-retry-count"
"""Header of the clients of OpenAI and Anthropic: how often they have sent the request before."""

_KEPT_S: Final = 3_600
"""Time for which a trajectory named by path is kept open after its last call."""

_UNLIMITED: Final = 2**53

_NO_COUNT: Final = (
    "tokens are not counted before a call: the engine renders its prompt. "
    "usage.input_tokens of an answer has their number"
)

router = APIRouter()
anthropic_router = APIRouter()
logger = logging.getLogger(__name__)


async def _session_of(request: Request) -> Session:
    """Return the session of a request. A session key names it, and else the path does."""
    session: Session | None = request.scope.get(SESSION)
    if session is not None:
        return session
    gateway: Gateway = request.app.state.gateway
    key, parts = key_of(request.scope), request.path_params
    run = path_run(parts["run"])
    key.require("produce", run=run)
    return Session(
        await find_run_async(gateway.client, run),
        _key_in(parts["group"].replace(SLASH, "/"), parts["sample"]),
        num_samples=0,
        max_calls=_UNLIMITED,
        max_tokens=_UNLIMITED,
        expires_ms=await gateway.sessions.now_ms() + _KEPT_S * 1000,
        key_id=key.key_id,
        owner=key.owner,
        writer=f"http-{key.name}",
    )


Caller = Annotated[Session, Depends(_session_of)]


class EndBody(SealFields):
    """The end of a session: a seal, or why nothing of it is trained."""

    siblings: StrictStr = "mask"
    abandon: StrictStr | None = None


class AnswerResponse(Response):
    """The response to a model call, sent as its answer grows."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer until the client disconnects."""
        await self._answer.send_to(receive, send)


@router.post("/v1/chat/completions")
async def chat(request: Request, session: Caller, body: LargeBody) -> Response:
    """Answer a chat completion, once it is stored as a turn of the session."""
    return await _call(request, session, body, api="chat/completions")


@router.post("/v1/completions")
async def complete(request: Request, session: Caller, body: LargeBody) -> Response:
    """Answer a completion, once it is stored as a turn of the session."""
    return await _call(request, session, body, api="completions")


@router.post("/v1/responses")
async def respond(request: Request, session: Caller, body: LargeBody) -> Response:
    """Answer a request of the Responses API, once it is stored as a turn of the session."""
    return await _call(request, session, body, api="responses")


@anthropic_router.post("/v1/messages")
async def message(request: Request, session: Caller, body: LargeBody) -> Response:
    """Answer a request of a message, once it is stored as a turn of the session."""
    return await _call(request, session, body, api="messages")


@anthropic_router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request, session: Caller, body: LargeBody) -> Response:
    """Refuse to count tokens."""
    return shaped_for(request.scope["path"], openai_error(404, _NO_COUNT))


@anthropic_router.get("/v1/models")
async def list_anthropic_models(request: Request, session: Caller) -> Response:
    """Return the models of all engines, as Anthropic lists them."""
    release_place()
    return json_response(listed_models(await request.app.state.engines.models()))


@router.get("/v1/models")
async def list_models(request: Request, session: Caller) -> Response:
    """Return the models of all engines."""
    release_place()
    models = await request.app.state.engines.models()
    return json_response({"object": "list", "data": models})


@router.get("/v1/session")
async def get_session(request: Request, session: Caller) -> Response:
    """Return the state of the trajectory, its stored calls, and those without a whole answer."""
    recorder: Recorder = request.app.state.recorder
    facts = await recorder.facts(session)
    return json_response({**session.key._asdict(), "run": session.run, **facts._asdict()})


@router.post("/v1/session/end")
async def end_session(request: Request, session: Caller, body: LargeBody) -> Response:
    """Seal or abandon the trajectory. The same end again changes nothing."""
    if not session.may_seal:
        raise AccessDeniedError("the session key may not end its trajectory: may_seal is false")
    recorder: Recorder = request.app.state.recorder
    end = parse_body(body or b"{}", EndBody)
    recording = recorder.recording(session)
    if end.abandon is not None:
        await recording.abandon(end.abandon)
        return json_response({"state": "abandoned"})
    seal = seal_of(vars(end))
    await recording.seal(seal)
    return json_response({"state": "awaiting_reward" if seal.awaits_reward else "sealed"})


async def _call(request: Request, session: Session, body: bytes, *, api: Api) -> Response:
    gateway: Gateway = request.app.state.gateway
    parse = functools.partial(_completion, api=api)
    content = await gateway.parsers.run(parse, body, owner=session.owner, is_json=True)
    retries = request.headers.get(_RETRIES, "0")
    call = ModelCall(
        session=session,
        api=api,
        body=body,
        content=content,
        is_retry=retries.isdecimal() and int(retries) > 0,
    )
    release_place()  # an engine may take minutes
    recorder: Recorder = request.app.state.recorder
    return AnswerResponse(await recorder.answer(call))


def _completion(body: bytes, *, api: Api) -> dict[str, Any]:
    """Return the completion that a body asks for; RecordError for anything but a JSON object."""
    try:
        content = json.loads(body)
    except ValueError as error:
        raise RecordError(f"the body is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise RecordError(f"the body is {quoted(content)}, expected a JSON object")
    if api == "messages":
        return chat_of_message(content)
    if api == "responses":
        return chat_of_response(content)
    return cast("dict[str, Any]", content)


def _key_in(group: str, sample: str) -> TrajectoryKey:
    if not (sample.isascii() and sample.isdecimal()):
        raise InvalidTurnError("sample", f"{quoted(sample)} in the path is no number")
    return checked_key(TrajectoryKey(group, int(sample)), num_samples=None)


class PathApp:
    """An application whose paths may have encoded slashes in run and group, as `SLASH`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        raw: bytes = scope.get("raw_path") or b""
        if scope["type"] == "http" and b"%2f" in raw.lower():
            parts = [unquote(part).replace("/", SLASH) for part in raw.decode("ascii").split("/")]
            scope = {**scope, "path": "/".join(parts)}
        await self._app(scope, receive, send)


def make_proxy_apps(
    gateway: Gateway, engines: Engines, publishers: Publishers
) -> dict[str, FastAPI]:
    """Return the applications by the first part of their paths."""
    recorder = Recorder(gateway, engines, publishers)
    gateway.closing.push_async_callback(recorder.close)
    apps = {each: FastAPI(openapi_url=None) for each in (KEY_PREFIX, ANTHROPIC, PATH_PREFIX)}
    apps[KEY_PREFIX].include_router(router)
    apps[ANTHROPIC].include_router(anthropic_router)
    apps[PATH_PREFIX].include_router(router, prefix="/{run}/{group}/{sample}")
    apps[PATH_PREFIX].add_middleware(PathApp)
    for app in apps.values():
        app.router.redirect_slashes = False
        app.state.gateway, app.state.engines, app.state.recorder = gateway, engines, recorder
        app.add_exception_handler(TurnstreamError, _refuse)
        app.add_exception_handler(HTTPException, _http)
        app.add_exception_handler(ClientDisconnect, disconnected)
        app.add_exception_handler(Exception, _failed)
    return apps


async def _refuse(request: Request, error: Exception) -> Response:
    count_error(type(error), service="gateway")
    return shaped_for(request.scope["path"], openai_error_of(error))


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = str(error.detail)
    if error.status_code == 404:
        text = f"no route has the path {quoted(request.scope['path'])}"
    return shaped_for(request.scope["path"], openai_error(error.status_code, text))


async def _failed(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return shaped_for(request.scope["path"], openai_error_of(error))
