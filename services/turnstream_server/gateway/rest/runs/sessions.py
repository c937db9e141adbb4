"""Session keys of agents: `POST /v1/runs/{run}/sessions`."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, StrictBool, StrictInt, StrictStr

from turnstream.generator.encode.group_checks import checked_key, checked_opening
from turnstream.store.client.run_ids import find_run_async
from turnstream.store.run.configs import read_config_async
from turnstream.types import TrajectoryKey
from turnstream_server.gateway.rest.bodies import Body, SmallBodyRoute
from turnstream_server.gateway.rest.caller import Produce, RunName
from turnstream_server.gateway.rest.ingest.routes import writer_of
from turnstream_server.keys.sessions import (
    DEFAULT_EXPIRES_S,
    DEFAULT_MAX_CALLS,
    DEFAULT_MAX_TOKENS,
    LONGEST_S,
    Session,
)

router = APIRouter(tags=["sessions"], route_class=SmallBodyRoute)

MAX_TEXT: Final = 256
"""Characters of `prompt_uid` and `policy`. Proxies limit a header, as a session key is, to 8 kB."""

_MAX_NAME: Final = 512
_MAX_COUNT: Final = 2**53 - 1


class NewSession(Body):
    """The trajectory of an agent, and the limits of its session key."""

    group_id: StrictStr = Field(min_length=1, max_length=_MAX_NAME, examples=["task-7"])
    sample: StrictInt = Field(ge=0, examples=[0])
    attempt: StrictInt = Field(0, ge=0, examples=[0])
    num_samples: StrictInt = Field(ge=1, description="Trajectories of the group.", examples=[2])
    prompt_uid: StrictStr = Field(
        "", max_length=MAX_TEXT, description="Name of the prompt in the data set."
    )
    policy: StrictStr = Field(
        "",
        max_length=MAX_TEXT,
        description="Name of the model whose calls are stored. Calls for another model are passed "
        "on. Empty stores every call.",
    )
    max_calls: StrictInt = Field(
        DEFAULT_MAX_CALLS, ge=1, le=_MAX_COUNT, description="Stored calls, at most."
    )
    max_tokens: StrictInt = Field(
        DEFAULT_MAX_TOKENS,
        ge=1,
        le=_MAX_COUNT,
        description="Prompt and sampled tokens of all stored calls, at most.",
    )
    expires_in_s: StrictInt = Field(
        DEFAULT_EXPIRES_S, ge=1, le=LONGEST_S, description="Seconds until the key is refused."
    )
    may_seal: StrictBool = Field(
        True, description="Whether the key may seal or abandon the trajectory."
    )


class SessionOpened(BaseModel):
    """A session key, for an agent."""

    key: str = Field(description="It is shown this once.", examples=["tms-Qm9v"])
    expires_ms: int = Field(description="Server ms from which on it is refused.")
    environment: dict[str, str] = Field(
        description="Variables with which an unmodified agent calls this gateway.",
        examples=[{"OPENAI_BASE_URL": "http://10.0.0.7:7601/openai/v1"}],
    )


@router.post(
    "/runs/{run}/sessions", response_model=SessionOpened, summary="Make a session key of an agent"
)
async def post_session(
    request: Request, run: RunName, caller: Produce, body: NewSession
) -> SessionOpened:
    """Make the key with which an agent writes one trajectory: its model calls become turns.

    Nothing is opened: the first model call opens the trajectory, under the writer of requests
    without `X-Turnstream-Writer`. The key ends with the trajectory, or with the API key.
    """
    checked_opening(body.group_id, body.num_samples, body.prompt_uid)
    named = TrajectoryKey(body.group_id, body.sample, body.attempt)
    run_id = await find_run_async(caller.client, run)
    await read_config_async(caller.client, run_id)
    sessions = caller.gateway.sessions
    session = Session(
        run=run_id,
        key=checked_key(named, num_samples=body.num_samples),
        num_samples=body.num_samples,
        prompt_uid=body.prompt_uid,
        policy=body.policy,
        max_calls=body.max_calls,
        max_tokens=body.max_tokens,
        expires_ms=await sessions.now_ms() + body.expires_in_s * 1000,
        may_seal=body.may_seal,
        key_id=caller.key.key_id if caller.key.is_stored else "",
        owner=caller.key.owner,
        writer=writer_of(caller.key),
    )
    key, url = await sessions.sign(session), caller.gateway.options.public_url or _own_url(request)
    return SessionOpened(
        key=key, expires_ms=session.expires_ms, environment=environment_of(key, url=url)
    )


def environment_of(key: str, *, url: str) -> dict[str, str]:
    """Return the variables of an agent with a session key, for the gateway at this address.

    >>> environment_of("tms-a", url="http://gw:7601")["ANTHROPIC_BASE_URL"]
    'http://gw:7601/anthropic'
    """
    return {
        "OPENAI_BASE_URL": f"{url}/openai/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": f"{url}/anthropic",  # its clients add /v1
        "ANTHROPIC_API_KEY": key,
    }


def _own_url(request: Request) -> str:
    """Return the address by which the client of a request reaches this gateway."""
    host, port = request.scope.get("server") or ("127.0.0.1", 0)
    given = request.headers.get("host") or f"{host}:{port}"  # old clients send no Host
    return f"{request.url.scheme}://{given}"
