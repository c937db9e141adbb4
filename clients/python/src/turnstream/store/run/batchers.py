"""Where batchers answer: each registers its address in the store, under a lease."""

from __future__ import annotations

import time
from typing import Any, Final, cast

import redis

from turnstream.errors import BatcherUnavailableError
from turnstream.store.client import keys
from turnstream.store.client.connection import address_of_client
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import Command, Script

LEASE_S: Final = 15.0
"""A batcher that has not registered again for so long is not listed."""

SECURE: Final = "grpcs://"
"""First characters of the address of a batcher with TLS."""

_RETRY_S: Final = 0.2

_REGISTER = Script("register_batcher", "turnstream.store.run")


def register_command(address: str, *, lease_s: float = LEASE_S) -> Command:
    """Return the call that registers a batcher; nothing is sent.

    Args:
        address: "host:port" or "grpcs://host:port", as workers reach it.
        lease_s: seconds until it must register again; 0 removes it.
    """
    return _REGISTER((keys.BATCHERS,), address, int(lease_s * 1000))


def list_batchers(client: redis.Redis) -> list[str]:
    """Return the addresses of all batchers of a store, the last registered first."""
    with translating():
        seconds, microseconds = cast("tuple[int, int]", client.time())
        now_ms = seconds * 1_000 + microseconds // 1_000
        found: Any = client.zrevrangebyscore(keys.BATCHERS, "+inf", f"({now_ms}")
    return [address.decode() for address in found]


def wait_for_batchers(client: redis.Redis, *, timeout_s: float) -> list[str]:
    """Return the addresses of all batchers, once there is one."""
    ends_s = time.monotonic() + timeout_s
    while not (found := list_batchers(client)):
        if time.monotonic() >= ends_s:
            raise BatcherUnavailableError(
                f"no batcher is registered at the store {address_of_client(client)}: start one "
                "with `turnstream up` or `turnstream serve batcher`, or give its address"
            )
        time.sleep(_RETRY_S)
    return found
