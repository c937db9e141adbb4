"""The calls of a generator: `POST /v1/calls`, for `turnstream.connect("http://...")`.

The gateway keeps no state of a generator. Leases, numbers and the buffer of writes are those of the
SDK, as over Redis, so that each request may reach another gateway. A refused call has its error as
its reply, and the others are carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, NamedTuple

import redis
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from turnstream.generator.outbox.writes import StoreProcess
from turnstream.generator.requests import (
    SCRIPTS,
    SINGLE_SCRIPTS,
    AwaitWake,
    ReadTurns,
    ScriptRequest,
)
from turnstream.generator.transport.messages import MEDIA_TYPE, value_of
from turnstream.generator.transport.transport import first_words, parse_process, parse_transaction
from turnstream.store.client import keys
from turnstream.store.client.connection import MAX_BLOCK_S, AsyncLink, connect
from turnstream.store.client.deadlines import SILENT_S, SOCKET_TIMEOUT_S, is_silence
from turnstream.store.client.replies import translating
from turnstream.store.client.run_ids import find_run_async
from turnstream.store.client.scripts import Argument, pack
from turnstream.wire.v1 import calls_pb2 as wire
from turnstream_server.gateway.bodies import LargeBody
from turnstream_server.gateway.rest.caller import Caller, Known
from turnstream_server.gateway.rest.generators.plan import PlannedCalls, read_calls
from turnstream_server.gateway.rest.problems import Problem, problem_type, response
from turnstream_server.gateway.state import Gateway
from turnstream_server.keys.limits import Held, release_place

_WAIT_S: Final = 5.0
"""Longest wait for a free connection. The caller may have timed out by then."""

_FIRST_WORDS: Final = first_words((*SCRIPTS, *SINGLE_SCRIPTS))


class StoreLink(NamedTuple):
    """A connection that never connects again on its own, and the process that it reaches."""

    link: AsyncLink
    process: StoreProcess


class StoreLinks:
    """Connections to the store, each borrowed by one request; at most `max_links`."""

    def __init__(self, url: str, *, max_links: int) -> None:
        self._url = url
        self._max_links = max_links
        self._free = asyncio.Semaphore(max_links)
        self._idle: list[StoreLink] = []
        self._is_closed = False
        self._unnamed = _new_name()

    @contextlib.asynccontextmanager
    async def borrow(self) -> AsyncIterator[StoreLink]:
        """Lend a connection to the block. An error inside ends it, and all that are idle.

        RedisError or OSError if the store cannot be reached, or all are in use for long.
        """
        await self._acquire()
        try:
            link = self._idle.pop() if self._idle else await self._opened()
            try:
                yield link
            except BaseException:
                await link.link.close()
                await self._drop_idle()
                raise
            if self._is_closed:
                await link.link.close()
            else:
                self._idle.append(link)
        finally:
            self._free.release()

    async def close(self) -> None:
        """End all idle connections, and those in use after their block."""
        self._is_closed = True
        await self._drop_idle()

    async def _acquire(self) -> None:
        try:
            async with asyncio.timeout(_WAIT_S):
                await self._free.acquire()
        except TimeoutError as error:
            message = (
                f"all {self._max_links} connections of the gateway were in use for {_WAIT_S:g} s"
            )
            raise RedisConnectionError(message) from error

    async def _opened(self) -> StoreLink:
        link = AsyncLink(self._url)
        try:
            replies = await link.exchange(pack(_FIRST_WORDS), len(_FIRST_WORDS))
            _check_loaded(replies[:-2])
        except BaseException:
            await link.close()
            raise
        process = parse_process(*replies[-2:])
        # A store that does not say its name has one until the next loss.
        return StoreLink(link, process if process.name else process._replace(name=self._unnamed))

    async def _drop_idle(self) -> None:
        """End all idle connections: they may lead to a process that is gone."""
        idle, self._idle = self._idle, []
        self._unnamed = _new_name()
        for each in idle:
            await each.link.close()


def _check_loaded(replies: Sequence[Any]) -> None:
    for reply in replies:
        if isinstance(reply, Exception):
            raise RedisConnectionError(f"the store takes no scripts: {reply}")


def _new_name() -> str:
    return f"unknown-{secrets.token_hex(8)}"


router = APIRouter()

_MOST_GROUPED: Final = 256
"""Calls of one transaction, which blocks the store."""

_MAX_LINKS: Final = 16
_MAX_HELD: Final = 1_000
"""Generators whose groups wait for capacity, at most."""

_MAX_HELD_OF_KEY: Final = 250
"""Those of one key."""

_BYTES: Final = {"schema": {"type": "string", "format": "binary"}}


class _State(NamedTuple):
    """Connections for scripts, a client for records of adopted trajectories, and held waits."""

    links: StoreLinks
    client: redis.Redis
    held: Held


def add_generator_state(app: FastAPI, gateway: Gateway) -> None:
    """Add the connections that the route uses."""
    held = Held("waits for capacity", num=_MAX_HELD, num_of_key=_MAX_HELD_OF_KEY)
    url = gateway.options.redis_url
    links, client = StoreLinks(url, max_links=_MAX_LINKS), connect(url, silent_s=SILENT_S)
    gateway.resources.push_async_callback(links.close)
    gateway.resources.callback(client.close)
    app.state.generators = _State(links, client, held)


@router.post(
    "/calls",
    tags=["python"],
    summary="Send the calls of a generator",
    response_class=Response,
    responses={
        200: {"content": {MEDIA_TYPE: _BYTES}, "description": "A reply to each call, in order."},
        504: {"model": Problem, "description": "The store does not answer in time."},
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {MEDIA_TYPE: _BYTES, "application/octet-stream": _BYTES},
        }
    },
)
async def send_calls(request: Request, caller: Known, body: LargeBody) -> Response:
    """Carry out the calls of one generator for one run, and return a reply to each.

    It is for `turnstream.connect("http://...")`; body and answer are the messages `Calls` and
    `Replies` of calls.proto. Each call needs its role for the run, mostly `produce`. The reply to a
    refused call begins with NOPERM, and with INVALID for a record or an argument that is wrong. The
    status is 409 if the store was restarted since the answer that `store` names.
    """
    planned = await caller.gateway.parsers.run(
        lambda body: read_calls(body, caller.key), body, owner=caller.key.owner
    )
    message = planned.message
    run = message.run
    if run and not message.is_run_id:
        run = await find_run_async(caller.client, run)
        planned = planned.of_run(run)
    state: _State = request.app.state.generators
    if planned.alone is not None:
        return await _single(planned.alone, caller, state, run=run)
    try:
        async with state.links.borrow() as link:
            if message.store and message.store != link.process.name:
                return _restarted()
            return await _carried_out(planned, link, run=run)
    except (RedisError, OSError) as error:
        return _outage(error)


async def _carried_out(planned: PlannedCalls, link: StoreLink, *, run: str) -> Response:
    """Return the replies of the scripts that a request calls."""
    scripts, is_aborted = planned.scripts, False
    if planned.message.is_grouped and len(scripts) > 1:
        replies, is_aborted = await _grouped(scripts, link)
    else:
        words = [each.command.words for each in scripts]
        replies = await _exchange(link, words) if words else []
    answer = wire.Replies(
        run=run,
        store=link.process.name,
        is_aborted=is_aborted,
        replies=[value_of(each) for each in planned.replies(replies)],
    )
    if link.process.syncs_each_write is not None:
        answer.syncs_each_write = link.process.syncs_each_write
    return Response(answer.SerializeToString(), media_type=MEDIA_TYPE)


async def _grouped(scripts: Sequence[ScriptRequest], link: StoreLink) -> tuple[list[Any], bool]:
    """Return the replies of scripts in a few transactions, and whether one was aborted."""
    replies: list[Any] = []
    is_aborted = False
    for start in range(0, len(scripts), _MOST_GROUPED):
        words = [each.command.words for each in scripts[start : start + _MOST_GROUPED]]
        found = await _exchange(link, [("MULTI",), *words, ("EXEC",)])
        is_aborted = is_aborted or not isinstance(found[-1], list)
        replies += parse_transaction(found)
    return replies, is_aborted


async def _exchange(link: StoreLink, words: Sequence[Sequence[Argument]]) -> list[Any]:
    return await link.link.exchange(pack(words), len(words), timeout_s=SOCKET_TIMEOUT_S)


async def _single(
    alone: ReadTurns | AwaitWake, caller: Caller, state: _State, *, run: str
) -> Response:
    """Return the answer to a call that is no script."""
    gateway = caller.gateway
    if isinstance(alone, ReadTurns):

        def read() -> bytes:
            replies = wire.Replies(run=run)
            _add_stored_turns(replies.replies.add().items, state.client, alone)
            return replies.SerializeToString()

        body = await gateway.threads.run_heavy(read, owner=caller.key.owner)
        return Response(body, media_type=MEDIA_TYPE)
    with state.held.one_more(caller.key.key_id):
        release_place()
        known = {keys.run_keys(run).wake: alone.wake_id}
        timeout_s = min(alone.timeout_ms / 1000, MAX_BLOCK_S)
        await gateway.streams.wait(known, timeout_s=timeout_s)
    return Response(
        wire.Replies(run=run, replies=[wire.Value()]).SerializeToString(), media_type=MEDIA_TYPE
    )


def _add_stored_turns(items: wire.Values, client: redis.Redis, request: ReadTurns) -> None:
    """Add the records of a trajectory, its lease epoch, and whether it is sealed."""
    payload = keys.trajectory_keys(request.run, request.trajectory_id)
    with translating():
        entries: Any = client.execute_command("XRANGE", payload.turns, "-", "+")
        # Read last: no other writer has added to the turns if the lease is still ours.
        holder: Any = client.execute_command("HMGET", payload.meta, "epoch", "sealed")
    epoch, sealed = holder
    records = items.values.add().items
    entries.reverse()
    while entries:  # 48 MB at most, of which each copy is freed at once
        records.values.add().text = entries.pop()[1][b"r"]
    items.values.add().CopyFrom(value_of(int(epoch) if epoch else None))
    items.values.add().number = int(sealed == b"1")


def _restarted() -> Response:
    """Return the answer to a request that continues a connection to an earlier process."""
    title = "The store was restarted since the last request"
    detail = f"the store cannot continue the connection: {title.lower()}"
    type_ = problem_type("store-restarted")
    return response(Problem(type=type_, title=title, status=409, detail=detail))


def _outage(error: Exception) -> Response:
    """Return the answer for a store that is away, or silent."""
    is_silent = is_silence(error)
    title = "The store does not answer in time" if is_silent else "The store is away"
    return response(
        Problem(
            type=problem_type("unavailable"),
            title=title,
            status=504 if is_silent else 503,
            detail=str(error) or title,
            retry_after_s=1.0,
        )
    )
