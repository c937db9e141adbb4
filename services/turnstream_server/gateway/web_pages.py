"""Requests of foreign web pages, which a browser sends on behalf of a page: they are refused.

A gateway on the loopback needs no key, and a browser on the same machine reaches it. The browser
says where a request comes from:

- `Host` has the name that the page used. A foreign name may lead to this address (DNS rebinding).
- `Origin` has the origin of the page, for each request that could change something.
- `Sec-Fetch-Site` says the same of requests without `Origin`, such as those of images.

A page may send some media types without a question of the browser, and no route takes one of them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from turnstream.types.names import quoted
from turnstream_server.gateway.rest.bodies import ARROW, JSON
from turnstream_server.gateway.tinker.encodings import PROTOBUF

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
