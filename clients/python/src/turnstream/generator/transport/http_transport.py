"""The way of a publisher to a store behind a gateway: `POST /v1/calls`.

A connection to a store ends when the store is restarted, which a publisher must notice. An HTTP
connection may outlast it. So each answer names the process of the store, and the next request of a
link repeats this name. A gateway that reaches another process refuses the request, which counts as
a lost connection.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import httpx2
from google.protobuf.message import DecodeError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from turnstream.errors import RunNotFoundError, StoreUnavailableError
from turnstream.generator.outbox.writes import Answers, Round, StoreProcess
from turnstream.generator.requests import Request
from turnstream.generator.transport.messages import MEDIA_TYPE, call_of, reply_of
from turnstream.generator.transport.transport import Transport
from turnstream.http.client import certificates_for, headers_of, pause_s, refusal, unlogged
from turnstream.store.client.addresses import HttpAddress, parse_http
from turnstream.store.client.backoff import pause_after
from turnstream.store.client.connection import NUM_RETRIES
from turnstream.store.client.deadlines import CONNECT_TIMEOUT_S, SOCKET_TIMEOUT_S
from turnstream.store.client.keys import decode_name
from turnstream.store.client.replies import RefusedRequestError, translate
from turnstream.store.client.run_ids import no_such_run
from turnstream.types.names import RunId, is_run_id
from turnstream.wire.v1 import calls_pb2 as wire

_PATH: Final = "/v1/calls"
_PART_BYTES: Final = 1 << 18
"""Bytes of a body after which its progress is noted."""

_IDLE_S: Final = 60.0
"""A gateway keeps an idle connection for 75 s; publishers send heartbeats more often."""

_TOO_FAST: Final = 429
_SILENT: Final = 504


class HttpTransport(Transport):
    """The way of one writer, whose name is encoded, to the gateway at `url`, which has its key."""

    def __init__(self, url: str, *, writer: str) -> None:
        self._gateway = parse_http(url)
        self._tls = certificates_for(self._gateway)
        self._writer = decode_name(writer)
        self._http: httpx2.AsyncClient | None = None

    def link(self) -> HttpLink:
        """Return a new connection for rounds."""
        return HttpLink(self)

    async def reply(self, request: Request) -> Any:
        """Return the reply to a request."""
        replies = await self._retried(self.calls(request.run, [request]))
        reply = reply_of(replies.replies[0])
        if isinstance(reply, ResponseError):
            error = translate(reply)
            raise no_such_run(request.run) if isinstance(error, RunNotFoundError) else error
        return reply

    async def find_run(self, name: str) -> str:
        """Return the id of the run that has this name now."""
        replies = await self._retried(self.calls(name, ()))
        return RunId(replies.run)

    async def close(self) -> None:
        """Disconnect. Safe to repeat."""
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    def calls(self, run: str, requests: Sequence[Request], **fields: Any) -> wire.Calls:
        """Return the message of requests for one run; "" only asks which store answers."""
        return wire.Calls(
            run=run,
            is_run_id=bool(run) and is_run_id(run),
            writer=self._writer,
            calls=[call_of(each) for each in requests],
            **fields,
        )

    async def send(
        self, calls: wire.Calls, *, timeout_s: float, on_sent: Callable[[], float] | None = None
    ) -> wire.Replies:
        """Return the answer to calls, after the pauses that the gateway asks for."""
        body = calls.SerializeToString()
        try:
            async with asyncio.timeout(timeout_s) as limit:
                while True:
                    content = _parts(body, limit, on_sent)
                    with unlogged():
                        answer = await self._client().post(
                            _PATH, content=content, headers={"Content-Length": str(len(body))}
                        )
                    if (wait_s := pause_s(answer, left_s=_left_s(limit))) is None:
                        return _read(answer, self._gateway, num_calls=len(calls.calls))
                    await asyncio.sleep(wait_s)
        except TimeoutError as error:
            raise RedisTimeoutError(f"{self._gateway.base_url}: no answer in time") from error
        except httpx2.TimeoutException as error:
            raise RedisTimeoutError(self._words(error)) from error
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise RedisConnectionError(self._words(error)) from error

    async def _retried(self, calls: wire.Calls) -> wire.Replies:
        for attempt in range(NUM_RETRIES):
            try:
                return await self.send(calls, timeout_s=SOCKET_TIMEOUT_S)
            except RedisConnectionError:
                await asyncio.sleep(pause_after(attempt + 1))
        return await self.send(calls, timeout_s=SOCKET_TIMEOUT_S)

    def _client(self) -> httpx2.AsyncClient:
        if self._http is None:
            self._http = httpx2.AsyncClient(
                base_url=self._gateway.base_url,
                headers={
                    **headers_of(self._gateway),
                    "Accept": MEDIA_TYPE,
                    "Content-Type": MEDIA_TYPE,
                },
                limits=httpx2.Limits(keepalive_expiry=_IDLE_S),
                timeout=httpx2.Timeout(SOCKET_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
                verify=self._tls,
            )
        return self._http

    def _words(self, error: Exception) -> str:
        return f"{self._gateway.base_url}: {error}".rstrip(": ") or repr(error)


class HttpLink:
    """Rounds of one publisher to one process of the store, see `Link`."""

    def __init__(self, transport: HttpTransport) -> None:
        self._transport = transport
        self._store = ""

    async def exchange(
        self,
        sent: Round,
        *,
        timeout_s: float = SOCKET_TIMEOUT_S,
        on_sent: Callable[[], float] | None = None,
    ) -> Answers:
        """Return the answers to a round."""
        requests = [call.request for call in sent.calls]
        run = requests[0].run if requests else sent.sought
        store, self._store = "" if sent.is_first else self._store, ""
        calls = self._transport.calls(run, requests, store=store, is_grouped=sent.is_grouped)
        replies = await self._transport.send(calls, timeout_s=timeout_s, on_sent=on_sent)
        self._store = replies.store
        syncs = replies.syncs_each_write if replies.HasField("syncs_each_write") else None
        return Answers(
            [reply_of(each) for each in replies.replies],
            store=StoreProcess(replies.store, syncs) if sent.is_first else None,
            run=RunId(replies.run) if sent.sought else None,
            is_aborted=replies.is_aborted,
        )

    async def close(self) -> None:
        """Ask for the process again in the next round; the transport closes the connections."""
        self._store = ""


async def _parts(
    body: bytes, limit: asyncio.Timeout, on_sent: Callable[[], float] | None
) -> AsyncIterator[bytes]:
    """Yield the parts of a body. After each, the limit is moved, so that a slow link has time."""
    now_s = asyncio.get_running_loop().time
    for start in range(0, len(body), _PART_BYTES):
        yield body[start : start + _PART_BYTES]
        if on_sent is not None:
            limit.reschedule(now_s() + on_sent())


def _left_s(limit: asyncio.Timeout) -> float:
    return (limit.when() or math.inf) - asyncio.get_running_loop().time()


def _read(answer: httpx2.Response, gateway: HttpAddress, *, num_calls: int) -> wire.Replies:
    """Return the message of an answer; raise the error of one without replies."""
    if answer.status_code != 200 or answer.headers.get("content-type") != MEDIA_TYPE:
        raise _refusal(answer, gateway)
    try:
        replies = wire.Replies.FromString(answer.content)
    except DecodeError as error:
        raise RedisConnectionError(f"{gateway.base_url}: unreadable answer: {error}") from error
    if len(replies.replies) != num_calls:
        raise RedisConnectionError(f"{gateway.base_url} answered with too few replies")
    return replies


def _refusal(answer: httpx2.Response, gateway: HttpAddress) -> Exception:
    """Return the error of an answer without replies, as one of the Redis client.

    An outage of the gateway, or behind it, is a lost connection, which is retried. Any other
    refusal is final.
    """
    error = refusal(answer, gateway)
    if answer.status_code == _SILENT:
        return RedisTimeoutError(str(error))
    if answer.status_code == _TOO_FAST or isinstance(error, StoreUnavailableError):
        return RedisConnectionError(str(error))
    return RefusedRequestError(error)
