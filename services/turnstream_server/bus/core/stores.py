"""The store of a process: the embedded server, or an external one."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import redis
from redis.exceptions import ResponseError

from turnstream.errors import InvalidConfigError
from turnstream.service import URL_VARIABLE
from turnstream.store.client.connection import SETTINGS, SYNCS, connect, unsafe_setting
from turnstream.store.client.replies import translating
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.settings import Settings, checked_store_url, mask_password

_OLDEST = {"valkey": 8, "redis": 7}
_SYNCS = {"everysec": SYNCS, "fsync": ("always",)}


@contextlib.contextmanager
def open_store(settings: Settings, *, port: int = 0) -> Iterator[str]:
    """Return the URL of the store, which is available until the end of the block.

    Without TURNSTREAM_REDIS_URL the embedded server runs until then; an external server is checked,
    and never stopped.

    Args:
        settings: choice of the server, and the folder of the embedded one.
        port: port of the embedded server; 0 takes a free one.

    Raises:
        InvalidConfigError: the address is none of a store, or the external server is too old, or
            its settings would lose data.
        StoreUnavailableError: it cannot be reached, or the embedded one does not start.
    """
    if settings.redis_url is not None:
        url = checked_store_url(settings.redis_url.get_secret_value(), field=URL_VARIABLE)
        url = settings.with_password(url)
        check_store(url, durability=settings.durability)
        yield url
        return
    with EmbeddedServer(
        settings.data_dir,
        durability=settings.durability,
        max_memory_bytes=settings.store_max_bytes,
        port=port,
    ) as server:
        yield server.url


def check_store(url: str, *, durability: str) -> None:
    """Make sure that an external server keeps what it acknowledges.

    Raises:
        InvalidConfigError: the address is none of a store; or names the server's setting, its value
            and the one that is needed.
        StoreUnavailableError: the server cannot be reached.
    """
    with connect(checked_store_url(url, field=URL_VARIABLE)) as client, translating():
        facts: dict[str, Any] = client.info()  # pyright: ignore[reportAssignmentType]  # sync
        settings = _settings(client, durability=durability)
    where = mask_password(url)
    check_version(facts, where=where)
    _check_setting(where, "appendonly", "yes" if facts["aof_enabled"] else "no", needed="yes")
    _check_setting(where, "maxmemory-policy", facts["maxmemory_policy"], needed="noeviction")
    unsafe = unsafe_setting(settings, where=f"the server at {where}", syncs=_SYNCS[durability])
    if unsafe is not None:
        raise unsafe


def check_version(facts: Mapping[str, Any], *, where: str) -> None:
    """Raise InvalidConfigError if a server is too old for the scripts; `facts` are of INFO."""
    name = "valkey" if "valkey_version" in facts else "redis"
    version = str(facts[f"{name}_version"])
    major = re.match(r"\d+", version)
    if major is None or int(major[0]) < _OLDEST[name]:
        raise InvalidConfigError(
            URL_VARIABLE,
            f"{where} is {name} {version}; needed is Redis 7 or Valkey 8 and above",
        )


def _check_setting(where: str, setting: str, value: str, *, needed: str) -> None:
    if value != needed:
        raise InvalidConfigError(
            setting, f"the server at {where} has {value!r}; needed is {needed!r}"
        )


def _settings(client: redis.Redis, *, durability: str) -> dict[str, str]:
    """Return how the server syncs; empty if it forbids CONFIG GET and `everysec` is enough."""
    try:
        reply: Any = client.config_get(*SETTINGS)
    except ResponseError:
        if durability == "fsync":
            raise
        return {}
    found = {_text(name): _text(value) for name, value in reply.items()}
    return {"appendfsync": "", **found} if durability == "fsync" else found


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
