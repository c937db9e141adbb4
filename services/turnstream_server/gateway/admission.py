"""Admission of requests, before any route: foreign pages, rates and places of keys, size of bodies.

A gateway on the loopback needs no key, and a browser on the same machine reaches it. So requests
that a browser sends on behalf of a foreign page are refused. The browser says where they come from:

- `Host` has the name that the page used. A foreign name may lead to this address (DNS rebinding).
- `Origin` has the origin of the page, for each request that could change something.
- `Sec-Fetch-Site` says the same of requests without `Origin`, such as those of images.

A page may send some media types without a question of the browser, and no route takes one of them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from fastapi import HTTPException
from fastapi.responses import Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnstream.errors import (
    AccessDeniedError,
    RejectedError,
    TurnstreamError,
    UnknownKeyError,
)
from turnstream.types.names import quoted
from turnstream_server.gateway.bodies import (
    BODY,
    IN_LOOP_BYTES,
    BodyMemory,
    RequestBody,
    json_response,
    too_large_text,
)
from turnstream_server.gateway.proxy.errors import (
    HOW_TO_OPEN,
    PATHS,
    SESSION_PATHS,
    openai_error,
    openai_error_of,
    shaped_for,
)
from turnstream_server.gateway.rest.app import PREFIX
from turnstream_server.gateway.rest.bodies import ARROW, JSON
from turnstream_server.gateway.rest.problems import Problem, problem_of, response
from turnstream_server.gateway.state import Gateway
from turnstream_server.gateway.tinker.encodings import PROTOBUF
from turnstream_server.keys.limits import Meters, Place, Places, too_fast
from turnstream_server.keys.records import (
    IDENTITY,
    LOCAL_KEY,
    ApiKey,
    KeyChecks,
    KeyLimits,
    secret_of,
)
from turnstream_server.keys.sessions import SESSION, SESSION_PREFIX

NAMES: Final = "TURNSTREAM_HTTP_NAMES"
"""Setting with the names under which a gateway is reached."""

MEDIA_TYPES: Final = (JSON, PROTOBUF, ARROW, "application/octet-stream")
"""Media types of the bodies of all routes, in addition to those of the SDK."""

_OF_THE_SDK: Final = "application/vnd.turnstream."
"""First characters of the media types of the SDK, also of another release."""


class Refusal(NamedTuple):
    """Status and text of the answer to a request that is refused."""

    status: int
    text: str


def refusal_of(
    headers: Mapping[str, str], *, names: Collection[str], takes_any_host: bool
) -> Refusal | None:
    """Return why a request is refused: it is of a foreign page, or its body has no media type.

    Names of headers and of hosts are in lower case.

    >>> own = {"host": "127.0.0.1:7601", "origin": "http://127.0.0.1:7601"}
    >>> refusal_of(own, names=(), takes_any_host=False)
    >>> foreign = {"host": "127.0.0.1:7601", "origin": "http://127.0.0.1:8888"}
    >>> refusal_of(foreign, names=(), takes_any_host=False).status
    403
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if not (takes_any_host or _is_own(host, names)):
        return _foreign("Host", host)
    if origin is not None and not _is_same_origin(origin, host, names):
        return _foreign("Origin", origin)
    site = headers.get("sec-fetch-site", "none")
    is_link = headers.get("sec-fetch-mode") == "navigate"
    if origin is None and not is_link and site not in ("none", "same-origin"):
        return _foreign("Sec-Fetch-Site", site)
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    is_known = media_type in MEDIA_TYPES or media_type.startswith(_OF_THE_SDK)
    if _has_body(headers) and not is_known:
        return Refusal(415, f"Content-Type is {quoted(media_type)}, expected {JSON}")
    return None


def _is_own(host: str, names: Collection[str]) -> bool:
    """Return whether a Host is an address, a name of this machine, or one of these names.

    An address cannot be that of another server by its name. Old clients send no Host.

    >>> [_is_own(each, ["gw.lab"]) for each in ("", "[::1]:80", "localhost:7601", "GW.lab", "a.b")]
    [True, True, True, True, False]
    """
    name = _name_of(host)
    if name in ("", "localhost") or name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_same_origin(origin: str, host: str, names: Collection[str]) -> bool:
    """Return whether a page is of the gateway, or has one of its names: proxies change Hosts."""
    scheme, _, server = origin.lower().partition("://")
    if not server or scheme not in ("http", "https"):
        return False
    return server == host.lower() or _name_of(server) in names


def _name_of(server: str) -> str:
    """Return the host of "host:port", in lower case; "?" for a text that is none."""
    try:
        return urlsplit(f"//{server}").hostname or ("?" if server else "")
    except ValueError:
        return "?"


def _has_body(headers: Mapping[str, str]) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _foreign(header: str, value: str) -> Refusal:
    why = "web pages of other servers may not use this gateway"
    hint = f"{NAMES} has the names under which it is reached"
    return Refusal(403, f"{header} is {quoted(value)}: {why}; {hint}")


_STRANGER_BYTES: Final = 64 << 10
"""Largest body of a request without an accepted key: it is read before the key is required."""

_STRANGER_LIMITS: Final = KeyLimits(requests_per_s=100.0)
"""Limits of the requests without an accepted key, of each address."""

_MAX_REQUESTS: Final = 16_384
"""Requests of one key at the same time; the tinker SDK polls for each call in progress."""

_MAX_OF_STRANGERS: Final = 4_096
"""Requests without a known key from one address, at the same time."""

_REFUSALS: Final = KeyLimits(requests_per_s=10.0)
"""Refusals that a caller receives at once; each further one takes `_SLOW_S`."""

_SLOW_S: Final = 1.0


class LimitedApp:
    """An application whose requests are limited by their keys.

    It identifies the key of each request, for the routes too. A request without an accepted
    key is passed on, because some routes need none; its address stands for the key. A session key
    counts as the API key that made it.
    """

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway
        self._meters = Meters()
        self._refusals = Meters()
        self._small = Places(shared=2, alone=16)
        self._large = Places(shared=1, alone=4)
        self._strangers = Places(shared=1, alone=1)
        self._memory = BodyMemory()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it with status 403, 413, 415 or 429."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        options = self._gateway.options
        takes_any_host = options.requires_key and not options.names
        page = refusal_of(headers, names=options.names, takes_any_host=takes_any_host)
        if page is not None:
            await _refused(scope, page.status, page.text)(scope, receive, send)
            return
        error = await self._identify(scope, headers)
        if error is None:
            error = await self._answer(scope, headers, receive, send)
        if error is not None:
            owner = LOCAL_KEY._replace(key_id=_owner_of(scope), limits=_REFUSALS)
            if self._wait_s(self._refusals, owner):
                await asyncio.sleep(_SLOW_S)
            await _answer_to(scope, error)(scope, receive, send)

    async def _identify(self, scope: Scope, headers: Headers) -> TurnstreamError | None:
        """Note the key of a request in its scope; return why the request is refused before that.

        Keys that are not known are looked up one by one, and not often for one address.
        """
        keys, secret = self._gateway.keys, secret_of(headers)
        if secret.startswith(SESSION_PREFIX) or scope["path"].startswith(SESSION_PATHS):
            return await self._identify_session(scope, secret)
        if keys.is_known(secret):
            scope[IDENTITY] = await _identified(keys, secret)
            return None
        owner = _owner_of(scope)
        if self._strangers.num_present(owner) >= _MAX_OF_STRANGERS:
            return _too_many_present(owner, limit=_MAX_OF_STRANGERS)
        async with self._strangers.borrow(owner) as place:
            await place.take()
            stranger = LOCAL_KEY._replace(key_id=owner, limits=_STRANGER_LIMITS)
            is_known = keys.is_known(secret)  # by now
            if not is_known and (wait_s := self._wait_s(self._meters, stranger)):
                text = f"too many requests without an accepted key came from {owner}"
                return RejectedError(f"{text}: wait {wait_s:.1f} s", wait_s)
            scope[IDENTITY] = await _identified(keys, secret)
        return None

    async def _identify_session(self, scope: Scope, secret: str) -> TurnstreamError | None:
        """Note the session of a request in its scope; return why the request is refused.

        The store is asked about correctly signed keys only.
        """
        path = scope["path"]
        if not path.startswith(SESSION_PATHS):
            text = "a session key is for paths below /openai and /anthropic"
            return AccessDeniedError(f"{text}, and not for {quoted(path)}")
        if not secret.startswith(SESSION_PREFIX):
            return UnknownKeyError(f"the request has no session key: {HOW_TO_OPEN}")
        try:
            scope[SESSION] = session = await self._gateway.sessions.identify(secret)
            scope[IDENTITY] = await self._gateway.sessions.rights_of(session)
        except TurnstreamError as error:
            return error
        return None

    async def _answer(
        self, scope: Scope, headers: Headers, receive: Receive, send: Send
    ) -> RejectedError | None:
        """Answer a request whose key was looked up; return why it is refused for now."""
        found, declared = scope[IDENTITY], _declared_bytes(headers)
        limit = self._max_bytes(found)
        if declared > limit:
            refusal = _refused(scope, 413, too_large_text(limit))
            if not isinstance(found, ApiKey):
                refusal = _answer_to(scope, found)
            await refusal(scope, receive, send)
            return None
        is_chunked, owner = "transfer-encoding" in headers, _owner_of(scope)
        places, most = self._small, _MAX_REQUESTS
        if not isinstance(found, ApiKey):
            places, most = self._strangers, _MAX_OF_STRANGERS
        elif declared > IN_LOOP_BYTES or is_chunked:
            places = self._large
        if places.num_present(owner) >= most:
            name = found.name if isinstance(found, ApiKey) else owner
            return _too_many_present(name, limit=most)
        meter = None
        if isinstance(found, ApiKey):
            now_s = time.monotonic()
            meter = self._meters.of(found, now_s=now_s)
            if meter is not None and (wait_s := meter.admit(declared, now_s=now_s)):
                return too_fast(found, wait_s=wait_s)
        async with places.borrow(owner) as place:
            body = RequestBody(
                receive,
                limit=limit,
                declared=declared,
                meter=meter,
                memory=self._memory,
                owner=found.owner if isinstance(found, ApiKey) else "",
            )
            scope[BODY] = body
            try:
                refusal = await _not_read(scope, body) if declared or is_chunked else None
                if refusal is not None:
                    await refusal(scope, receive, send)
                else:
                    await place.take()
                    await self._app(scope, body.receive, _releasing(place, send))
            finally:
                body.close()
        return None

    def _wait_s(self, meters: Meters, owner: ApiKey) -> float:
        """Count a request; return the seconds until it may be counted, 0 if it was."""
        now_s = time.monotonic()
        meter = meters.of(owner, now_s=now_s)
        return 0.0 if meter is None else meter.admit(0, now_s=now_s)

    def _max_bytes(self, found: ApiKey | TurnstreamError) -> int:
        most = self._gateway.options.max_body_bytes
        if isinstance(found, TurnstreamError):
            return min(most, _STRANGER_BYTES)
        own = found.limits.max_body_bytes
        return most if own is None else min(most, own)


def _releasing(place: Place, send: Send) -> Send:
    """Return `send` that releases the place first: a client may read an answer slowly."""

    async def releasing(message: Message) -> None:
        place.release()
        await send(message)

    return releasing


async def _identified(keys: KeyChecks, secret: str) -> ApiKey | TurnstreamError:
    try:
        return await keys.identify(secret)
    except TurnstreamError as error:
        return error


def _owner_of(scope: Scope) -> str:
    """Return the id of the key of a request, or its network if no key is accepted.

    The network is the address of the client, and for IPv6 the first 64 bits of it.
    """
    found = scope.get(IDENTITY)
    if isinstance(found, ApiKey):
        return found.key_id
    client = scope.get("client") or ("unknown", 0)
    try:
        address = ipaddress.ip_address(client[0])
    except ValueError:
        return client[0]
    num_bits = 32 if isinstance(address, ipaddress.IPv4Address) else 64
    return str(ipaddress.ip_network((address, num_bits), strict=False).network_address)


def _declared_bytes(headers: Headers) -> int:
    text = headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdecimal() else 0


def _refused(scope: Scope, status: int, text: str) -> Response:
    if _is_proxy(scope):
        return shaped_for(scope["path"], openai_error(status, text))
    if _is_rest(scope):
        return response(Problem(type="about:blank", title=text, status=status, detail=text))
    return json_response({"detail": text}, status=status)


async def _not_read(scope: Scope, body: RequestBody) -> Response | None:
    """Receive a body, also for a route that reads none; return the answer if it is refused."""
    try:
        await body.read()
    except HTTPException as error:
        refusal = _refused(scope, error.status_code, error.detail)
        refusal.headers.update(error.headers or {})
        return refusal
    return None


def _too_many_present(owner: str, *, limit: int) -> RejectedError:
    return RejectedError(f"{owner!r} has {limit} requests in progress, the limit", _SLOW_S)


def _answer_to(scope: Scope, error: TurnstreamError) -> Response:
    """Return the answer to an error, in the form of the API of the request."""
    if _is_proxy(scope):
        return shaped_for(scope["path"], openai_error_of(error))
    problem = problem_of(error)
    answer = response(problem)
    if _is_rest(scope):
        return answer
    refusal = json_response({"detail": problem.detail}, status=problem.status)
    if problem.retry_after_s is not None:
        refusal.headers["Retry-After"] = answer.headers["Retry-After"]
    return refusal


def _is_rest(scope: Scope) -> bool:
    return scope["path"].startswith(f"{PREFIX}/")


def _is_proxy(scope: Scope) -> bool:
    return scope["path"].startswith(PATHS)
