"""The store for generators in Python: `turnstream.connect("http://...")` sends its commands here.

A body has commands of the Redis protocol, and the answer has their replies. Each command is checked
first. A refused one is answered with an error reply, and the others are sent.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, NamedTuple

from fastapi import APIRouter, FastAPI, Header, Request
from fastapi.responses import Response
from redis.exceptions import RedisError

from turnstream.errors import AccessDeniedError
from turnstream.store.client.deadlines import SOCKET_TIMEOUT_S, is_silence
from turnstream.store.client.http_address import COMMANDS, INSTANCE, REPLIES
from turnstream.store.client.scripts import pack
from turnstream_server.gateway.bodies import LargeBody
from turnstream_server.gateway.rest.access import Known
from turnstream_server.gateway.rest.commands.links import StoreLinks
from turnstream_server.gateway.rest.commands.packing import pack_replies
from turnstream_server.gateway.rest.commands.plan import Plan, plan_commands
from turnstream_server.gateway.rest.problems import Problem, problem_of, response
from turnstream_server.gateway.state import Gateway
from turnstream_server.keys.places import Held, release_place

router = APIRouter()

_MAX_LINKS: Final = 16
_MAX_BLOCKED: Final = 1_000
"""Publishers whose groups wait for capacity, at most; a store has 10,000 connections."""

_MAX_BLOCKED_OF_KEY: Final = 250
"""Those of one key."""

_LATE_S: Final = 5.0
"""Time for the reply of a blocking read, after its time."""

_BYTES: Final = {"schema": {"type": "string", "format": "binary"}}


class _Links(NamedTuple):
    """Connections of a gateway to the store: for quick commands, and for blocking reads."""

    quick: StoreLinks
    blocked: StoreLinks
    held: Held


def add_store_links(app: FastAPI, gateway: Gateway) -> None:
    """Add the connections that the route uses; blocking reads end before the gateway stops."""
    url = gateway.options.redis_url
    held = Held("blocking reads", num=_MAX_BLOCKED, num_of_key=_MAX_BLOCKED_OF_KEY)
    quick, blocked = (StoreLinks(url, max_links=each) for each in (_MAX_LINKS, _MAX_BLOCKED))
    links = _Links(quick, blocked, held)
    gateway.closing.push_async_callback(links.blocked.close, ends_lent=True)
    gateway.resources.push_async_callback(links.quick.close)
    app.state.store_links = links


@router.post(
    "/store",
    tags=["python"],
    summary="Send commands of the Python SDK",
    response_class=Response,
    responses={
        200: {"content": {REPLIES: _BYTES}, "description": "The replies, in order (RESP2)."},
        504: {"model": Problem, "description": "The store does not answer in time."},
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                COMMANDS: {**_BYTES, "example": "*1\r\n$4\r\nPING\r\n"},
                "application/octet-stream": _BYTES,
            },
        }
    },
)
async def send_commands(
    request: Request,
    caller: Known,
    body: LargeBody,
    instance: Annotated[
        str | None,
        Header(
            alias=INSTANCE,
            description="Process of the store that the last answer has named. Another one is 409.",
        ),
    ] = None,
) -> Response:
    """Send commands of the Redis protocol to the store, and return their replies.

    It is for `turnstream.connect("http://...")` and takes only what that sends: the scripts of the
    same release, and few reads. A key needs the role of each command, for the run of all its keys.
    The reply to any other command is an error that begins with NOPERM, and with INVALID for a
    record or an argument that cannot be read. The status is 403 if all commands are refused.
    """
    plan = await caller.gateway.parsers.run(
        lambda body: plan_commands(body, caller.key), body, owner=caller.key.owner
    )
    if plan.denial:
        return response(problem_of(AccessDeniedError(plan.denial)))
    if not plan.sent:
        return _answer(plan, [])
    links: _Links = request.app.state.store_links
    if not plan.block_s:
        return await _exchange(plan, links.quick, instance, timeout_s=SOCKET_TIMEOUT_S)
    with links.held.one_more(caller.key.key_id):
        release_place()
        return await _exchange(plan, links.blocked, instance, timeout_s=plan.block_s + _LATE_S)


async def _exchange(
    plan: Plan, lender: StoreLinks, instance: str | None, *, timeout_s: float
) -> Response:
    """Return the answer with the replies to the sent commands of a plan."""
    replies: list[Any] | None = None
    try:
        async with lender.lent() as link:
            if instance in (None, "", link.instance):
                packed = pack(plan.sent)
                replies = await link.link.exchange(packed, len(plan.sent), timeout_s=timeout_s)
    except (RedisError, OSError) as error:
        return _outage(error)
    if replies is None:
        return _other_store()
    return _answer(plan, replies, instance=link.instance)


def _answer(plan: Plan, replies: list[Any], *, instance: str = "") -> Response:
    headers = {INSTANCE: instance} if instance else {}
    return Response(pack_replies(plan.answers(replies)), headers=headers, media_type=REPLIES)


def _other_store() -> Response:
    """Return the answer to a request that continues a connection to an earlier process."""
    title = "The store was restarted since the last request"
    return response(
        Problem(
            type="https://turnstream.dev/problems/store-restarted",
            title=title,
            status=409,
            detail=f"the store cannot continue the connection: {title.lower()}",
        )
    )


def _outage(error: Exception) -> Response:
    """Return the answer for a store that is away, or silent.

    The detail is the error of the connection alone: a client puts its own words before it.
    """
    is_silent = is_silence(error)
    title = "The store does not answer in time" if is_silent else "The store is away"
    return response(
        Problem(
            type="https://turnstream.dev/problems/unavailable",
            title=title,
            status=504 if is_silent else 503,
            detail=str(error) or title,
            retry_after_s=1.0,
        )
    )
