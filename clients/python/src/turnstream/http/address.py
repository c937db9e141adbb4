"""Addresses of a gateway: `http://host:7601`, with its API key where a program passes one on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from urllib.parse import SplitResult, quote, unquote, urlsplit

from turnstream.store.client.api_keys import own_key

_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAddress:
    """A gateway.

    Attributes:
        base_url: its address, without the key, and without a slash at the end.
        host: name or IP address.
        port: TCP port.
        api_key: key of its requests; "" for none.
    """

    base_url: str
    host: str
    port: int
    api_key: str = field(repr=False)


def is_http(url: str) -> bool:
    """Return whether an address is one of a gateway.

    >>> is_http("https://host"), is_http("redis://host")
    (True, False)
    """
    return url.partition("://")[0].lower() in _PORTS


def parse_http(url: str) -> HttpAddress:
    """Return the parts of an address. An address without a key has that of this program.

    >>> parse_http("http://:tml-secret@host:7601/").base_url
    'http://host:7601'

    Raises:
        ValueError: it is no address of a gateway.
        InvalidConfigError: the file with the key of this program cannot be read.
    """
    parts = _checked_parts(url)
    key = own_key() if parts.password is None else unquote(parts.password)
    return HttpAddress(
        base_url=without_key(url).rstrip("/"),
        host=parts.hostname or "",
        port=_port(parts),
        api_key=key,
    )


def with_key(url: str, api_key: str) -> str:
    """Return an address that has this key, for functions that take an address alone.

    >>> with_key("http://host:7601", "tml-a/b")
    'http://:tml-a%2Fb@host:7601'
    """
    parts = urlsplit(url)
    address = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f":{quote(api_key, safe='')}@{address}").geturl()


def without_key(url: str) -> str:
    """Return an address as it may be shown.

    >>> without_key("http://:tml-secret@host:7601")
    'http://host:7601'
    """
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def http_host_and_port(url: str) -> str:
    """Return "host:port" of an address; ValueError if it is none of a gateway.

    >>> http_host_and_port("https://host/turnstream")
    'host:443'
    """
    parts = _checked_parts(url)
    return f"{parts.hostname}:{_port(parts)}"


def _checked_parts(url: str) -> SplitResult:
    parts = urlsplit(url)
    if not parts.hostname:
        raise ValueError("it has no host")
    if parts.query or parts.fragment:
        raise ValueError("it has a part after '?' or '#'")
    if parts.username:
        raise ValueError("it has a user: pass the key as api_key")
    _port(parts)
    return parts


def _port(parts: SplitResult) -> int:
    return parts.port or _PORTS[parts.scheme]
