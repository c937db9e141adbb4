"""API keys: the rights and the record of each, and the check of the key of a request.

A key itself is never stored: its hash is its id. Checks keep an answer of the store for a second.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import secrets
import time
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args

import redis.asyncio
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turnstream.errors import (
    AccessDeniedError,
    CorruptRecordError,
    StoreUnavailableError,
    TurnstreamError,
    UnavailableError,
    UnknownKeyError,
)
from turnstream.store.client.api_keys import METADATA
from turnstream.store.client.replies import translating
from turnstream.types.names import RunId

Role = Literal["produce", "train", "read", "admin"]
"""Roles of a key:

- produce: open groups, append turns, post rewards, take tasks;
- train: pull batches and acknowledge steps, announce versions, use the Tinker API;
- read: configuration, ledger, batches, versions, reasons for waiting, metrics;
- admin: create, change and delete runs; every other role too.

Every role reads the names, settings, credit and versions of runs.
"""

ROLES: Final[tuple[Role, ...]] = get_args(Role)
PREFIX: Final = "tml-"

KEYS: Final = "tk:keys"
"""Hash in the store, from the id of a key to its record."""

_SECRET_BYTES: Final = 32
_OWNER_DIGITS: Final = 32


class KeyLimits(NamedTuple):
    """Limits of one key in one process of a gateway or batcher; None for no limit.

    Attributes:
        requests_per_s: mean number of requests; as many at once as in two seconds.
        bytes_per_s: mean bytes of request bodies; as many at once as in two seconds.
        max_body_bytes: largest body of one request.
    """

    requests_per_s: float | None = None
    bytes_per_s: float | None = None
    max_body_bytes: int | None = None


NO_LIMITS: Final = KeyLimits()


class ApiKey(NamedTuple):
    """Name, roles, runs and limits of a key.

    Attributes:
        key_id: hash of the key, hexadecimal.
        runs: names of the runs that the key may use; empty for all.
        created_ms: server ms.
        expires_ms: server ms from which on the key is refused; None for no end.
        owner: owner of the models and checkpoints that are made with the key. Another key of the
            same name has the same owner. Not stored.
    """

    key_id: str
    name: str
    roles: frozenset[Role]
    runs: tuple[str, ...] = ()
    created_ms: int = 0
    expires_ms: int | None = None
    limits: KeyLimits = NO_LIMITS
    owner: str = "local"

    @property
    def is_stored(self) -> bool:
        """Whether the store has the key; else it is one of the loopback, where none is needed."""
        return self.created_ms > 0

    def require(self, *roles: Role, run: str | None = None) -> None:
        """Raise AccessDeniedError if the key has none of these roles, or may not use this run.

        `run` is a name or an id.

        >>> ApiKey("", "ci", frozenset({"read"})).require("produce")
        Traceback (most recent call last):
            ...
        turnstream.errors.AccessDeniedError: key 'ci' has the roles read, needed is produce
        """
        if not self.roles.intersection((*roles, "admin")):
            have = ", ".join(sorted(self.roles))
            raise AccessDeniedError(f"key {self.name!r} has the roles {have}, needed is {roles[0]}")
        self.require_run(run)

    def require_run(self, run: str | None) -> None:
        """Raise AccessDeniedError if the key may not use this run."""
        if run is not None and self.runs and RunId(run).name not in self.runs:
            allowed = ", ".join(self.runs)
            message = f"key {self.name!r} may use the runs {allowed}, and not {str(run)!r}"
            raise AccessDeniedError(message)


LOCAL_KEY: Final = ApiKey("", "local", frozenset(ROLES))
"""Rights of a request without a key where none is needed: on the loopback."""


def new_secret() -> str:
    """Return a new key."""
    return PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def key_id_of(secret: str) -> str:
    """Return the id of a key; the key cannot be read from it."""
    return hashlib.sha256(secret.encode()).hexdigest()


def owner_of(text: str) -> str:
    """Return the owner that a key or the name of a stored key stands for."""
    return hashlib.sha256(text.encode()).hexdigest()[:_OWNER_DIGITS]


def encode_key(key: ApiKey) -> bytes:
    """Return a key as JSON, without id and owner."""
    values: dict[str, Any] = key._asdict() | {
        "roles": sorted(key.roles),
        "limits": key.limits._asdict(),
    }
    del values["key_id"], values["owner"]
    return json.dumps(values, separators=(",", ":"), sort_keys=True).encode()


def encoded_name(name: str) -> bytes:
    """Return the name of a key as `encode_key` writes it, with the name of the field.

    >>> encoded_name("team")
    b'"name":"team"'
    """
    return f'"name":{json.dumps(name)}'.encode()


class _Record(BaseModel):
    """A key as it is stored."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str
    roles: frozenset[str]
    runs: tuple[str, ...]
    created_ms: int
    expires_ms: Annotated[int, Field(lt=2**53)] | None
    limits: dict[str, Annotated[int | float, Field(gt=0, lt=2**63)] | None]


def decode_key(key_id: str, stored: bytes) -> ApiKey:
    """Return the key of `encode_key`; CorruptRecordError for other bytes."""
    try:
        values = _Record.model_validate_json(stored).model_dump()
        limits = KeyLimits(**values.pop("limits"))
        return ApiKey(key_id, limits=limits, owner=owner_of(values["name"]), **values)
    except (ValidationError, TypeError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        message = f"the record of the key with the id {key_id[:8]}... cannot be read: {why}"
        raise CorruptRecordError(message) from error


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
            key = await self.stored(key_id)
        except UnavailableError:
            if self.requires_key:
                raise
            key = None  # as at a start during an outage: polls are held
        if key is not None:
            return key
        if self.requires_key or not secret.startswith(PREFIX):
            raise UnknownKeyError("the key of the request is unknown or revoked")
        return LOCAL_KEY._replace(key_id=key_id, owner=owner_of(secret))

    async def stored(self, key_id: str) -> ApiKey | None:
        """Return a stored key by its id, a second old at most; None for no such key.

        UnknownKeyError for an expired one, UnavailableError if the store does not answer.
        """
        found = await self._find(key_id)
        if found.key is not None and found.expires_s <= time.monotonic():
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
