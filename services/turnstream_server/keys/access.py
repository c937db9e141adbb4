"""Checks of the keys of requests, with a cache of one second."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final, NamedTuple, cast

import redis.asyncio

from turnstream.errors import (
    CorruptRecordError,
    StoreUnavailableError,
    UnavailableError,
    UnknownKeyError,
)
from turnstream.store.client.replies import translating
from turnstream_server.keys.records import (
    LOCAL_KEY,
    PREFIX,
    ApiKey,
    decode_key,
    key_id_of,
    owner_of,
)
from turnstream_server.keys.store import KEYS

_FRESH_S: Final = 1.0
_OUTAGE_S: Final = 300.0
"""Time for which a known key is accepted while the store does not answer."""

_ANSWER_S: Final = 3.0
"""Longest wait for the store where the last answer may be used in its place."""

_MAX_CACHED: Final = 10_000


class _Found(NamedTuple):
    """Answer of the store.

    Attributes:
        key: the stored key; None for none.
        asked_s: time of the last read, also of one that failed.
        answered_s: time of the last answer.
    """

    key: ApiKey | None
    asked_s: float
    answered_s: float


class KeyChecks:
    """Checks of keys in one process.

    Args:
        client: the store.
        requires_key: requests need a key that is stored. Else, on the loopback, a request without
            a key may do all, and any other key that begins with `tml-` is an owner of its own.
    """

    def __init__(self, client: redis.asyncio.Redis, *, requires_key: bool) -> None:
        self.requires_key = requires_key
        self._client = client
        self._found: dict[str, _Found] = {}

    def is_known(self, secret: str) -> bool:
        """Return whether a key was accepted lately, or every key is accepted."""
        if not self.requires_key and (not secret or secret.startswith(PREFIX)):
            return True
        found = self._found.get(key_id_of(secret))
        return found is not None and found.key is not None

    async def identify(self, secret: str) -> ApiKey:
        """Return what a key allows.

        Raises:
            UnknownKeyError: there is no key, or it is unknown, revoked or expired.
            UnavailableError: the store does not answer.
        """
        if not secret:
            if self.requires_key:
                raise UnknownKeyError("the request has no key: send it as X-API-Key or bearer")
            return LOCAL_KEY
        key_id = key_id_of(secret)
        try:
            key = await self._find(key_id)
        except UnavailableError:
            if self.requires_key:
                raise
            key = None  # as at a start during an outage: polls are held
        if key is None:
            if self.requires_key or not secret.startswith(PREFIX):
                raise UnknownKeyError("the key of the request is unknown or revoked")
            return LOCAL_KEY._replace(key_id=key_id, owner=owner_of(secret))
        if key.expires_ms is not None and key.expires_ms <= time.time() * 1000:
            raise UnknownKeyError(f"the key {key.name!r} has expired")
        return key

    async def _find(self, key_id: str) -> ApiKey | None:
        """Return a stored key, a second old at most; an older one while the store is away."""
        now_s, found = time.monotonic(), self._found.get(key_id)
        if found is not None and now_s - found.asked_s < _FRESH_S:
            return found.key
        try:
            key = await self._read(key_id, within_s=None if found is None else _ANSWER_S)
        except UnavailableError:
            if found is None or now_s - found.answered_s > _OUTAGE_S:
                raise
            self._keep(key_id, found._replace(asked_s=time.monotonic()))
            return found.key
        now_s = time.monotonic()
        self._keep(key_id, _Found(key, now_s, now_s))
        return key

    async def _read(self, key_id: str, *, within_s: float | None) -> ApiKey | None:
        try:
            async with asyncio.timeout(within_s):
                with translating():
                    stored = cast("bytes | None", await cast(Any, self._client.hget(KEYS, key_id)))
        except TimeoutError as error:
            raise StoreUnavailableError(f"no answer within {within_s} s") from error
        try:
            return None if stored is None else decode_key(key_id, stored)
        except CorruptRecordError as error:
            raise UnknownKeyError(str(error)) from error

    def _keep(self, key_id: str, found: _Found) -> None:
        if len(self._found) >= _MAX_CACHED:
            self._found.clear()
        self._found[key_id] = found
