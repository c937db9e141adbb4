"""Decision at the start of a service whether its requests need a key."""

from __future__ import annotations

import ipaddress
import logging
from pathlib import Path

import redis

from turnstream.errors import InvalidConfigError
from turnstream.store.client.api_keys import FILE_VARIABLE
from turnstream_server.keys.files import ensure_key_file
from turnstream_server.keys.store import SERVICE, add_service_key, list_keys

logger = logging.getLogger(__name__)


def requires_key(
    client: redis.Redis, *, host: str, key_file: Path | None, is_insecure: bool
) -> bool:
    """Return whether requests need a key, after the key of the file was stored.

    They need one on every address that other machines reach, and wherever a file of a key is set.

    Args:
        client: the store.
        host: address to listen on.
        key_file: file with the key of the services, created if it is missing; None for none.
        is_insecure: requests need no key.

    Raises:
        InvalidConfigError: other machines reach the address, and there is no key.
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
