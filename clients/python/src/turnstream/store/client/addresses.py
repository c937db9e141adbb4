"""Addresses of a store, and of a gateway: `http://host:7601`, with its API key if it has one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from urllib.parse import SplitResult, quote, unquote, urlsplit

from redis.connection import parse_url

from turnstream.errors import InvalidConfigError
from turnstream.store.client.api_keys import own_key
from turnstream.types.names import quoted, text_trouble

DEFAULT_URL: Final = "redis://127.0.0.1:7379"
"""Where `turnstream up` keeps its store."""

URL_VARIABLE: Final = "TURNSTREAM_REDIS_URL"

_PORT: Final = 6379
_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAddress:
    """A gateway.

    Attributes:
        base_url: its address, without the key, and without a slash at the end.
        api_key: key of its requests; "" for none.
    """

    base_url: str
    host: str
    port: int
    api_key: str = field(repr=False)


def checked_url(url: str, *, field: str = "url") -> str:
    """Return the address of a store or a gateway, if it is one.

    >>> checked_url("redis://localhost:7379")
    'redis://localhost:7379'
    """
    if text_trouble(url):
        raise InvalidConfigError(field, f"{_without_password(url)} is not a valid text")
    try:
        if not is_http(url):
            parse_url(url)
        address_of(url)
    except ValueError as error:
        shown_url = _without_password(url)
        form = "redis://HOST:PORT, or http://HOST:PORT for a gateway"
        if "://" not in url and ":" in url:
            form = f"redis://{url.rpartition('@')[2]}"
        reason = "" if "://" not in url else f" ({error})"
        raise InvalidConfigError(
            field, f"{shown_url} is not the address of a store{reason}: write {form}"
        ) from error
    return url


def _without_password(url: object) -> str:
    if isinstance(url, bytes):
        return quoted(url.rpartition(b"@")[2])
    return quoted(url.rpartition("@")[2] if isinstance(url, str) else url)


def address_of(url: str) -> str:
    """Return the address of a store or a gateway without its credentials.

    >>> address_of("redis://me:secret@10.0.0.7:6379/0"), address_of("unix:///run/store.sock?db=1")
    ('10.0.0.7:6379', '/run/store.sock')
    """
    if is_http(url):
        return http_host_and_port(url)
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return parts.path
    return f"{parts.hostname or 'localhost'}:{parts.port or _PORT}"


def is_http(url: str) -> bool:
    """Return whether an address is one of a gateway.

    >>> is_http("https://host"), is_http("redis://host")
    (True, False)
    """
    return url.partition("://")[0].lower() in _PORTS


def parse_http(url: str) -> HttpAddress:
    """Return the parts of an address; ValueError if it is none.

    One without a key has that of this program.
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
