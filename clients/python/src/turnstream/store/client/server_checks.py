"""Checks that a server keeps the writes that it acknowledges.

Each new connection reads version and settings of its server before its first command. So a server
that took the place of another one is checked too. A server that hides a value from its user is not
refused for it: batchers and gateways have the rights to read all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, Final

from redis.exceptions import BusyLoadingError, ResponseError

from turnstream.errors import UnsafeStoreError
from turnstream.store.client.replies import RefusedRequestError

SETTINGS: Final = ("appendfsync", "no-appendfsync-on-rewrite")
"""Settings that are read with CONFIG GET."""

SYNCS: Final = ("everysec", "always")
"""Safe values of `appendfsync`: with "no" the system syncs after half a minute or longer."""

SYNCS_OF: Final = {"everysec": SYNCS, "fsync": ("always",)}
"""Safe values of `appendfsync` for each durability."""

_OLDEST: Final = {"valkey": 8, "redis": 7}
_COMMANDS: Final = (("INFO",), ("CONFIG", "GET", *SETTINGS))


def unsafe_server(
    facts: Mapping[str, str], *, where: str, syncs: Collection[str] = SYNCS
) -> UnsafeStoreError | None:
    """Return the error of the first fact for which a server is refused; None if it is safe.

    With `no-appendfsync-on-rewrite` nothing is synced while the file is rewritten.

    >>> str(unsafe_server({"redis_version": "6.2.14"}, where="the store at s:6379"))
    'redis_version: the store at s:6379 has 6.2.14; needed is Redis 7 or Valkey 8 and above'
    >>> str(unsafe_server({"appendfsync": "no"}, where="the store at s:6379"))
    "appendfsync: the store at s:6379 has 'no'; needed is 'everysec'"

    Args:
        facts: the fields of INFO and the settings of CONFIG GET, by name; a missing one is hidden.
        where: the server, for the message.
        syncs: safe values of `appendfsync`; the error asks for the first. A server that hides its
            value is assumed to sync every second.
    """
    name = "valkey_version" if "valkey_version" in facts else "redis_version"
    version = facts.get(name)
    if version is not None and _major(version) < _OLDEST[name.partition("_")[0]]:
        needed = "needed is Redis 7 or Valkey 8 and above"
        return UnsafeStoreError(name, f"{where} has {version}; {needed}")
    found = dict(facts)
    if "aof_enabled" in facts:
        found["appendonly"] = "no" if facts["aof_enabled"] == "0" else "yes"
    if "maxmemory_policy" in facts:
        found["maxmemory-policy"] = facts["maxmemory_policy"]
    safe = {
        "appendonly": ("yes",),
        "maxmemory-policy": ("noeviction",),
        **dict(zip(SETTINGS, (tuple(syncs), ("no",)), strict=True)),
    }
    if SYNCS[0] not in syncs:
        found.setdefault("appendfsync", "hidden")
    for setting, values in safe.items():
        value = found.get(setting)
        if value is not None and value not in values:
            return UnsafeStoreError(setting, f"{where} has {value!r}; needed is {values[0]!r}")
    return None


def checking(syncs: Collection[str] = SYNCS) -> Callable[[Any], None]:
    """Return the function with which redis-py ends the connect of a connection: it checks it."""

    def check(connection: Any) -> None:
        connection.on_connect()
        replies: list[Any] = []
        for words in _COMMANDS:
            connection.send_command(*words, check_health=False)
        for _ in _COMMANDS:
            try:
                replies.append(connection.read_response())
            except ResponseError as error:
                replies.append(error)
        _check(replies, connection=connection, syncs=syncs)

    return check


def checking_async() -> Callable[[Any], Coroutine[Any, Any, None]]:
    """Return the same function for asyncio."""

    async def check(connection: Any) -> None:
        await connection.on_connect()
        replies: list[Any] = []
        for words in _COMMANDS:
            await connection.send_command(*words, check_health=False)
        for _ in _COMMANDS:
            try:
                replies.append(await connection.read_response())
            except ResponseError as error:
                replies.append(error)
        _check(replies, connection=connection, syncs=SYNCS)

    return check


def _check(replies: list[Any], *, connection: Any, syncs: Collection[str]) -> None:
    """Raise RefusedRequestError for the replies of an unsafe server.

    BusyLoadingError for a server that reads its file: it reports no append-only file meanwhile, and
    a later connection checks it.
    """
    where = getattr(connection, "path", None) or f"{connection.host}:{connection.port}"
    facts = _facts(*replies)
    if facts.get("loading") == "1":
        raise BusyLoadingError(f"the store at {where} is loading its data")
    unsafe = unsafe_server(facts, where=f"the store at {where}", syncs=syncs)
    if unsafe is not None:
        raise RefusedRequestError(unsafe)


def _facts(info: Any, settings: Any) -> dict[str, str]:
    r"""Return both replies by name; nothing of a reply that is an error.

    >>> _facts(b"# Server\r\nredis_version:7.0.15\r\n", [b"appendfsync", b"always"])
    {'redis_version': '7.0.15', 'appendfsync': 'always'}
    """
    found: dict[str, str] = {}
    if isinstance(info, bytes):
        for line in info.decode(errors="replace").splitlines():
            name, colon, value = line.partition(":")
            if colon:
                found[name] = value
    if isinstance(settings, list):
        words = [bytes(word).decode(errors="replace") for word in settings]
        found.update(zip(words[::2], words[1::2], strict=False))
    return found


def _major(version: str) -> int:
    found = re.match(r"\d+", version)
    return int(found[0]) if found else 0
