"""Connections of redis-py that reach the store through a gateway, over HTTP.

Commands travel as the body of `POST /v1/store`, and their replies as its answer, both in the bytes
of the Redis protocol. So all users of a client or a link work alike over both: order, retries,
errors.

A connection to a store ends when the store is restarted, which its user must notice. An HTTP
connection may outlast it. So the gateway names the process of the store in every answer, and a
connection repeats this name in its next request. A gateway that reaches another process refuses the
request, which counts as a lost connection.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import ssl
import time
from collections.abc import Iterable
from typing import Any, Final

import hiredis
import httpx2
import redis.asyncio.connection
import redis.connection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, NoPermissionError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from turnstream.errors import (
    AccessDeniedError,
    RejectedError,
    TurnstreamError,
    UnknownKeyError,
)
from turnstream.http.address import HttpAddress
from turnstream.store.client.api_keys import root_certificates, trusting_context
from turnstream.store.client.http_address import COMMANDS, INSTANCE, PATH, REPLIES
from turnstream.store.client.replies import RefusedRequestError

_TOO_FAST: Final = 429
_SILENCE: Final = 504
_OTHER_STORE: Final = 409
_CONNECTION: Final = (408, _OTHER_STORE, 421, 425, _TOO_FAST)
"""Statuses of clients that, like 5xx, are about the way to the store and not about the request."""

_LEAST_PAUSE_S: Final = 0.05

_IDLE_S: Final = 60.0
"""A gateway keeps an idle connection for 75 s; publishers send heartbeats more often."""


def _is_foreign(record: logging.LogRecord) -> bool:
    """Return whether a line in the log of httpx2 is about the request of another module."""
    urls = record.args[1:2] if isinstance(record.args, tuple) else ()
    return not any(str(url).endswith(PATH) for url in urls)


# A publisher sends many requests in a second, and each would be a line at INFO.
logging.getLogger("httpx2").addFilter(_is_foreign)


def http_settings(gateway: HttpAddress) -> dict[str, Any]:
    """Return the arguments of connections to a gateway, beside those of redis-py.

    Raises:
        InvalidConfigError: the file that TURNSTREAM_TLS_CA names has no certificates.
    """
    is_secure = gateway.base_url.startswith("https")
    return {
        "host": gateway.host,
        "port": gateway.port,
        "gateway": gateway,
        "tls": trusting_context(root_certificates()) if is_secure else _untrusting(),
    }


class HttpConnection(redis.connection.Connection):
    """A connection of redis-py, for threads.

    Args:
        gateway: where the store is reached.
        tls: certificates to trust.
        options: those of redis-py's connections.
    """

    def __init__(self, *, gateway: HttpAddress, tls: ssl.SSLContext, **options: Any) -> None:
        super().__init__(**options)
        self._gateway = gateway
        self._tls = tls
        self._pending = _Pending(gateway, self._parser)
        self._http: httpx2.Client | None = None

    @property
    def is_connected(self) -> bool:
        """Return whether a request was sent since the last disconnection."""
        return self._http is not None

    def connect(self) -> None:
        """Do nothing: the first request connects."""

    def on_connect(self) -> None:
        """Do nothing: the gateway has its own connections to the store."""

    def check_health(self) -> None:
        """Do nothing: a request of its own would say nothing of the next one."""

    def can_read(self, timeout: float = 0) -> bool:
        """Return whether replies were not read."""
        return self._pending.has_replies

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Keep commands until the first of their replies is read."""
        self._pending.add(command)

    def read_response(self, *_: Any, **__: Any) -> Any:
        """Return the next reply; the first of several commands sends all of them."""
        try:
            if self._pending.has_commands:
                self._pending.accept(self._answer())
            reply = self._pending.next_reply()
        except httpx2.TimeoutException as error:
            self.disconnect()
            raise RedisTimeoutError(_words(error, self._gateway)) from error
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            self.disconnect()
            raise RedisConnectionError(_words(error, self._gateway)) from error
        except BaseException:
            self.disconnect()
            raise
        if isinstance(reply, ResponseError):
            raise reply
        return reply

    def disconnect(self, *_: Any, **__: Any) -> None:
        """Close the connection, and drop what was not sent or read. Safe to repeat."""
        pending, http = self.__dict__.get("_pending"), self.__dict__.get("_http")
        self._http = None
        if pending is not None:
            pending.reset()
        if http is not None:
            http.close()

    def _answer(self) -> httpx2.Response:
        """Return the answer to the commands, after the pauses that the gateway asks for."""
        if self._http is None:
            self._http = httpx2.Client(**_settings(self, self._gateway, self._tls))
        ends_s = time.monotonic() + (self.socket_timeout or math.inf)
        body = self._pending.take()
        while True:
            answer = self._http.post(self._pending.url, content=body, headers=self._pending.headers)
            pause_s = _pause_s(answer, left_s=ends_s - time.monotonic())
            if pause_s is None:
                return answer
            time.sleep(pause_s)


class AsyncHttpConnection(redis.asyncio.connection.Connection):
    """The same as `HttpConnection`, for asyncio."""

    def __init__(self, *, gateway: HttpAddress, tls: ssl.SSLContext, **options: Any) -> None:
        super().__init__(**options)
        self._gateway = gateway
        self._tls = tls
        self._pending = _Pending(gateway, self._parser)
        self._http: httpx2.AsyncClient | None = None

    @property
    def is_connected(self) -> bool:
        """Return whether a request was sent since the last disconnection."""
        return self._http is not None

    async def connect(self) -> None:
        """Do nothing: the first request connects."""

    async def on_connect(self) -> None:
        """Do nothing: the gateway has its own connections to the store."""

    async def check_health(self) -> None:
        """Do nothing: a request of its own would say nothing of the next one."""

    async def can_read(self) -> bool:
        """Return whether replies were not read."""
        return self._pending.has_replies

    async def can_read_destructive(self) -> bool:
        """Return the same as `can_read`, for older releases of redis-py."""
        return self._pending.has_replies

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Keep commands until the first of their replies is read."""
        self._pending.add(command)

    async def read_response(self, *_: Any, **__: Any) -> Any:
        """Return the next reply; the first of several commands sends all of them."""
        try:
            if self._pending.has_commands:
                self._pending.accept(await self._answer())
            reply = self._pending.next_reply()
        except httpx2.TimeoutException as error:
            await self.disconnect()
            raise RedisTimeoutError(_words(error, self._gateway)) from error
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            await self.disconnect()
            raise RedisConnectionError(_words(error, self._gateway)) from error
        except BaseException:
            await self.disconnect()
            raise
        if isinstance(reply, ResponseError):
            raise reply
        return reply

    async def disconnect(self, *_: Any, **__: Any) -> None:
        """Close the connection, and drop what was not sent or read. Safe to repeat."""
        http, self._http = self._http, None
        self._pending.reset()
        if http is not None:
            await http.aclose()

    async def _answer(self) -> httpx2.Response:
        """Return the answer to the commands, after the pauses that the gateway asks for."""
        if self._http is None:
            self._http = httpx2.AsyncClient(**_settings(self, self._gateway, self._tls))
        ends_s = time.monotonic() + (self.socket_timeout or math.inf)
        body = self._pending.take()
        while True:
            answer = await self._http.post(
                self._pending.url, content=body, headers=self._pending.headers
            )
            pause_s = _pause_s(answer, left_s=ends_s - time.monotonic())
            if pause_s is None:
                return answer
            await asyncio.sleep(pause_s)


class _Pending:
    """Commands of one connection that were not sent, and replies that were not read.

    Args:
        gateway: where they go.
        parser: parser of redis-py, which makes the errors of error replies.

    Attributes:
        url: address of the requests.
        headers: those that differ from request to request.
    """

    def __init__(self, gateway: HttpAddress, parser: Any) -> None:
        self.url = gateway.base_url + PATH
        self.headers: dict[str, str] = {}
        self._base_url = gateway.base_url
        self._parser = parser
        self.reset()

    def reset(self) -> None:
        """Drop everything: the next request begins a new connection to the store."""
        self.headers = {}
        self._commands: list[bytes] = []
        self._denied = ""
        self._reader = hiredis.Reader(
            protocolError=InvalidResponse, replyError=self._parser.parse_error
        )

    @property
    def has_commands(self) -> bool:
        """Return whether commands were not sent."""
        return bool(self._commands)

    @property
    def has_replies(self) -> bool:
        """Return whether replies were not read."""
        return self._reader.has_data()

    def add(self, command: str | bytes | Iterable[bytes]) -> None:
        """Add commands to those of the next request."""
        if isinstance(command, str):
            command = command.encode()
        self._denied = ""
        self._commands += [command] if isinstance(command, bytes) else command

    def take(self) -> bytes:
        """Return the body of the next request."""
        commands, self._commands = self._commands, []
        return commands[0] if len(commands) == 1 else b"".join(commands)

    def accept(self, answer: httpx2.Response) -> None:
        """Take the replies from an answer.

        Raises:
            RedisError: the answer has none; see `_refusal`.
        """
        if answer.status_code == 403:
            self._denied = _detail(answer)
            return
        if answer.status_code != 200 or answer.headers.get("content-type") != REPLIES:
            raise _refusal(answer, self._base_url)
        if instance := answer.headers.get(INSTANCE):  # missing where nothing was sent to the store
            self.headers = {INSTANCE: instance}
        self._reader.feed(answer.content)

    def next_reply(self) -> Any:
        """Return the next reply; errors of the server are returned, those of the way raised."""
        if self._denied:
            return NoPermissionError(self._denied)
        reply = self._reader.gets()
        if reply is False:
            raise RedisConnectionError(f"{self._base_url} answered with too few replies")
        if isinstance(reply, RedisConnectionError):  # a store that is loading its data
            raise reply
        return reply


def _refusal(answer: httpx2.Response, base_url: str) -> Exception:
    """Return the error of an answer without replies.

    An outage of the gateway, or behind it, is a lost connection, which is retried. Any other
    refusal is final.
    """
    status, detail = answer.status_code, _detail(answer)
    if status == _SILENCE:
        return RedisTimeoutError(detail)
    if status >= 500 or status in _CONNECTION:
        return RedisConnectionError(detail)
    error: TurnstreamError = RejectedError(f"{base_url}: HTTP {status}: {detail}")
    if status == 401:
        error = UnknownKeyError(detail)
    elif status == 407:
        error = AccessDeniedError(f"a proxy denied access: {detail}")
    elif status < 300 or status in (404, 405):
        error = RejectedError(f"{base_url} is no gateway of this release: HTTP {status} at {PATH}")
    elif status < 400:
        location = answer.headers.get("location", "")
        error = RejectedError(f"{base_url} refers to {location!r}: use the address of the gateway")
    return RefusedRequestError(error)


def _detail(answer: httpx2.Response) -> str:
    """Return the detail of a problem document, else the reason of the status."""
    try:
        detail = answer.json()["detail"]
    except (ValueError, KeyError, TypeError):
        detail = None
    return str(detail) if detail else f"HTTP {answer.status_code} {answer.reason_phrase}".strip()


def _pause_s(answer: httpx2.Response, *, left_s: float) -> float | None:
    """Return the seconds after which a request may be repeated; None if it is not to be."""
    if answer.status_code != _TOO_FAST:
        return None
    text = answer.headers.get("retry-after", "")
    pause_s = max(_LEAST_PAUSE_S, float(text) if text.isdecimal() else 1.0)
    return pause_s if pause_s < left_s else None


def _settings(connection: Any, gateway: HttpAddress, tls: ssl.SSLContext) -> dict[str, Any]:
    """Return the arguments of the HTTP client of a connection."""
    headers = {"Content-Type": COMMANDS, "Accept": REPLIES}
    if gateway.api_key:
        headers["X-API-Key"] = gateway.api_key
    silent_s, connect_s = connection.socket_timeout, connection.socket_connect_timeout
    return {
        "headers": headers,
        "limits": httpx2.Limits(max_connections=1, keepalive_expiry=_IDLE_S),
        "timeout": httpx2.Timeout(silent_s, connect=connect_s),
        "verify": tls,
    }


@functools.lru_cache(maxsize=1)
def _untrusting() -> ssl.SSLContext:
    """Return a context without any certificate, for addresses without TLS."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _words(error: Exception, gateway: HttpAddress) -> str:
    return f"{gateway.base_url}: {error}".rstrip(": ") or repr(error)
