"""The stored keys, the file of the key of a service, and whether its requests need one."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

import redis

from turnstream.errors import (
    BatchingError,
    ConflictError,
    CorruptRecordError,
    InvalidConfigError,
    RunNotFoundError,
)
from turnstream.store.client.api_keys import FILE_VARIABLE, read_key_file
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import Script, run_command
from turnstream.types.names import checked_run_name, encode_run
from turnstream_server.keys.records import (
    KEYS,
    NO_LIMITS,
    PREFIX,
    ROLES,
    ApiKey,
    KeyLimits,
    Role,
    decode_key,
    encode_key,
    encoded_name,
    key_id_of,
    new_secret,
)

_CREATE: Final = Script("create_key", "turnstream_server.keys")

SERVICE: Final = "service"
"""Name of the key in the file of TURNSTREAM_KEY_FILE."""

_DAMAGED: Final = "damaged:"
_MAX_NAME: Final = 128
_MAX_RUNS: Final = 1_000


def create_key(
    client: redis.Redis,
    name: str,
    *,
    roles: Sequence[Role],
    runs: Sequence[str] = (),
    expires_s: float | None = None,
    limits: KeyLimits = NO_LIMITS,
    secret: str | None = None,
) -> str:
    """Create a key, and return its secret, which is shown this once.

    `runs` are the names that it may use, empty for all. BatchingError for a wrong value,
    ConflictError if another key has the name.
    """
    _check(name, roles=roles, runs=runs, expires_s=expires_s, limits=limits)
    secret = secret or new_secret()
    now_ms = _now_ms(client)
    key = ApiKey(
        key_id=key_id_of(secret),
        name=name,
        roles=frozenset(roles),
        runs=tuple(runs),
        created_ms=now_ms,
        expires_ms=None if expires_s is None else now_ms + round(expires_s * 1000),
        limits=limits,
    )
    (outcome,) = run_command(
        client, _CREATE((KEYS,), key.key_id, encode_key(key), name, encoded_name(name))
    )
    if outcome != b"created":
        raise ConflictError(f"there is a key {name!r}: revoke it first, or choose another name")
    return secret


def add_service_key(client: redis.Redis, secret: str) -> bool:
    """Add a key with the name `SERVICE` and all roles; return whether that is new.

    A key that is stored already keeps its name, roles and runs.
    """
    key = ApiKey(key_id_of(secret), SERVICE, frozenset(ROLES), created_ms=_now_ms(client))
    with translating():
        return bool(client.hsetnx(KEYS, key.key_id, encode_key(key)))  # pyright: ignore[reportArgumentType]


def list_keys(client: redis.Redis) -> list[ApiKey]:
    """Return all keys, the oldest first; expired ones too.

    A record that cannot be read is listed as a key without roles, with the name
    `damaged:` and the start of its id.
    """
    return sorted(_stored(client).values(), key=lambda key: (key.created_ms, key.name))


def revoke_key(client: redis.Redis, name: str) -> None:
    """Delete every key of a name as `list_keys` has it; services refuse them a second later."""
    found = [key_id for key_id, key in _stored(client).items() if key.name == name]
    if not found:
        raise RunNotFoundError(f"there is no key {name!r}")
    with translating():
        client.hdel(KEYS, *found)


def _check(
    name: str,
    *,
    roles: Sequence[str],
    runs: Sequence[str],
    expires_s: float | None,
    limits: KeyLimits,
) -> None:
    if not name.isprintable() or not name.strip() or len(name) > _MAX_NAME:
        raise BatchingError(f"name is {name!r}, expected 1 to {_MAX_NAME} printable characters")
    if not roles or not set(roles) <= set(ROLES):
        raise BatchingError(f"roles are {list(roles)}, expected some of {', '.join(ROLES)}")
    if len(runs) > _MAX_RUNS:
        raise BatchingError(f"runs has {len(runs)} names, expected {_MAX_RUNS} at most")
    for run in runs:
        encode_run(checked_run_name(run))
    numbers = {"expires_s": expires_s, **limits._asdict()}
    for field, value in numbers.items():
        if value is not None and not 0 < value < math.inf:
            raise BatchingError(f"{field} is {value}, expected a number above 0")


def _stored(client: redis.Redis) -> dict[bytes, ApiKey]:
    with translating():
        stored = cast("dict[bytes, bytes]", client.hgetall(KEYS))
    return {key_id: _decoded(key_id, record) for key_id, record in stored.items()}


def _decoded(stored_id: bytes, record: bytes) -> ApiKey:
    key_id = stored_id.decode(errors="backslashreplace")
    try:
        return decode_key(key_id, record)
    except CorruptRecordError:
        return ApiKey(key_id, f"{_DAMAGED}{key_id[:8]}", frozenset())


def _now_ms(client: redis.Redis) -> int:
    with translating():
        seconds, microseconds = cast("tuple[int, int]", cast(Any, client.time()))
    return seconds * 1000 + microseconds // 1000


logger = logging.getLogger(__name__)

_LEAST_CHARACTERS: Final = 24
"""A shorter key could be guessed."""


def requires_key(
    client: redis.Redis, *, host: str, key_file: Path | None, is_insecure: bool
) -> bool:
    """Return whether requests need a key, after the key of the file was stored.

    They need one on every address that other machines reach, and wherever a file of a key is set.
    InvalidConfigError if other machines reach the address, and there is no key.
    """
    if key_file is not None and add_service_key(client, ensure_key_file(key_file)):
        logger.info("the key of %s is stored as %r, with all roles", key_file, SERVICE)
    if is_insecure:
        if not is_loopback(host):
            logger.warning("requests to %s need no key: --insecure is set", host)
        return False
    if key_file is None and is_loopback(host):
        return False
    if key_file is None and not list_keys(client):
        raise InvalidConfigError(
            "--listen",
            f"other machines reach {host!r}, and there is no API key: create one with `turnstream "
            f"key create`, name a file for one in {FILE_VARIABLE}, or accept requests without a "
            "key with --insecure",
        )
    return True


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address.

    >>> [is_loopback(each) for each in ("127.0.0.1", "[::1]", "localhost", "0.0.0.0", "[::]")]
    [True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def ensure_key_file(path: Path) -> str:
    """Return the key in a file; a missing file is created with a new key, for its owner alone.

    The first one wins if several processes create it at the same time. InvalidConfigError if the
    file cannot be read or written, or has no key.
    """
    if not path.exists():
        try:
            _create(path, new_secret())
        except OSError as error:
            raise InvalidConfigError(FILE_VARIABLE, f"{path} cannot be written: {error}") from error
    secret = read_key_file(path)
    if not secret.startswith(PREFIX) or len(secret) < _LEAST_CHARACTERS:
        raise InvalidConfigError(
            FILE_VARIABLE,
            f"{path} has no key that begins with {PREFIX} and has {_LEAST_CHARACTERS} characters",
        )
    return secret


def _create(path: Path, secret: str) -> None:
    """Write a file that appears whole, unless there is one by then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.draft")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(f"{secret}\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
