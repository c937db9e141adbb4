"""API keys and what they allow. A key itself is never stored: its hash is its id."""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turnstream.errors import AccessDeniedError, CorruptRecordError
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
