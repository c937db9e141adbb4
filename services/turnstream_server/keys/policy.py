"""Whether the requests of a service need a key, and the file that has its own key."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
from pathlib import Path
from typing import Final

import redis

from turnstream.errors import InvalidConfigError
from turnstream.store.client.api_keys import FILE_VARIABLE, read_key_file
from turnstream_server.keys.records import PREFIX, new_secret
from turnstream_server.keys.store import SERVICE, add_service_key, list_keys

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
