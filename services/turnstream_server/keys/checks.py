"""Checks of the keys of requests, with a cache of one second."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import redis.asyncio

from turnstream.errors import (
    CorruptRecordError,
    StoreUnavailableError,
    TurnstreamError,
    UnavailableError,
    UnknownKeyError,
)
from turnstream.store.client.api_keys import METADATA
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

IDENTITY: Final = "turnstream.identity"
"""Entry of the scope of an HTTP request: its `ApiKey`, or the error of the check."""

_FRESH_S: Final = 1.0
_OUTAGE_S: Final = 300.0
"""Time for which a known key is accepted while the store does not answer."""

_ANSWER_S: Final = 3.0
"""Longest wait for the store where the last answer may be used in its place."""

_MAX_CACHED: Final = 10_000

_BEARER: Final = "bearer "


class _Found(NamedTuple):
    """Answer of the store; `key` is None for none.

    `asked_s` is the time of the last read, also of one that failed, `answered_s` of the last
    answer, `expires_s` that at which the store will refuse the key.
    """

    key: ApiKey | None
    asked_s: float
    answered_s: float
    expires_s: float


def secret_of(headers: Mapping[str, str]) -> str:
    """Return the key in the headers of a request, or in the metadata of a call; "" for none.

    Names are in lower case. An empty `x-api-key` counts as none.

    >>> secret_of({"x-api-key": "", "authorization": "Bearer tml-a"}), secret_of({})
    ('tml-a', '')
    """
    if key := headers.get(METADATA):
        return key
    authorization = headers.get("authorization", "")
    is_bearer = authorization[: len(_BEARER)].lower() == _BEARER
    return authorization[len(_BEARER) :].strip() if is_bearer else ""


def key_of(scope: Mapping[str, Any]) -> ApiKey:
    """Return the key of a request whose scope has it, or raise the error of its check."""
    found: ApiKey | TurnstreamError = scope[IDENTITY]
    if isinstance(found, TurnstreamError):
        raise found
    return found


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
        self._known: dict[str, _Found] = {}
        self._unknown: dict[str, _Found] = {}

    def is_known(self, secret: str) -> bool:
        """Return whether a key was accepted lately, or every key is accepted."""
        if not self.requires_key and (not secret or secret.startswith(PREFIX)):
            return True
        return key_id_of(secret) in self._known

    async def identify(self, secret: str) -> ApiKey:
        """Return what a key allows.

        UnknownKeyError for no key, or one that is unknown, revoked or expired; UnavailableError if
        the store does not answer.
        """
        if not secret:
            if self.requires_key:
                raise UnknownKeyError("the request has no key: send it as X-API-Key or bearer")
            return LOCAL_KEY
        key_id = key_id_of(secret)
        try:
            found = await self._find(key_id)
        except UnavailableError:
            if self.requires_key:
                raise
            found = None  # as at a start during an outage: polls are held
        if found is None or found.key is None:
            if self.requires_key or not secret.startswith(PREFIX):
                raise UnknownKeyError("the key of the request is unknown or revoked")
            return LOCAL_KEY._replace(key_id=key_id, owner=owner_of(secret))
        if found.expires_s <= time.monotonic():
            raise UnknownKeyError(f"the key {found.key.name!r} has expired")
        return found.key

    async def _find(self, key_id: str) -> _Found:
        """Return a stored key, a second old at most; an older one while the store is away."""
        now_s, found = time.monotonic(), self._known.get(key_id) or self._unknown.get(key_id)
        if found is not None and now_s - found.asked_s < _FRESH_S:
            return found
        try:
            read = await self._read(key_id, within_s=None if found is None else _ANSWER_S)
        except UnavailableError:
            if found is None or now_s - found.answered_s > _OUTAGE_S:
                raise
            read = found._replace(asked_s=time.monotonic())
        self._keep(key_id, read)
        return read

    async def _read(self, key_id: str, *, within_s: float | None) -> _Found:
        """Return the answer of the store, whose clock decides when a key expires."""
        try:
            async with asyncio.timeout(within_s):
                with translating():
                    pipeline = self._client.pipeline(transaction=False)
                    pipeline.hget(KEYS, key_id)
                    pipeline.time()
                    stored, (seconds, microseconds) = await pipeline.execute()
        except TimeoutError as error:
            raise StoreUnavailableError(f"no answer within {within_s} s") from error
        try:
            key = None if stored is None else decode_key(key_id, stored)
        except CorruptRecordError as error:
            raise UnknownKeyError(str(error)) from error
        now_s = time.monotonic()
        if key is None or key.expires_ms is None:
            return _Found(key, now_s, now_s, math.inf)
        left_s = key.expires_ms / 1000 - seconds - microseconds / 1e6
        return _Found(key, now_s, now_s, now_s + left_s)

    def _keep(self, key_id: str, found: _Found) -> None:
        """Keep an answer in the cache; above its limit, drop the oldest one.

        Unknown keys are kept apart from known ones: a caller can invent many of them.
        """
        self._known.pop(key_id, None)
        kept = self._unknown if found.key is None else self._known
        if len(kept) >= _MAX_CACHED and key_id not in kept:
            del kept[next(iter(kept))]
        kept[key_id] = found
