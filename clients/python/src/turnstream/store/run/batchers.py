"""Where batchers answer: each registers its address in the store, under a lease."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import redis

from turnstream.errors import BatcherUnavailableError
from turnstream.store.client import keys
from turnstream.store.client.connection import address_of_client, connect
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import Command, Script

LEASE_S: Final = 15.0
"""A batcher that has not registered again for so long is not listed."""

SECURE: Final = "grpcs://"
"""First characters of the address of a batcher with TLS."""

ANSWER_S: Final = 2.0
"""Longest wait for a store that is silent, while a call to a batcher waits for its address."""

Target = str | Callable[[], Sequence[str]]
"""Addresses of batchers, with commas between them, or a function that returns the present ones.

The function raises UnavailableError if there is none."""

_REGISTER = Script("register_batcher", "turnstream.store.run")


def register_command(address: str, *, lease_s: float = LEASE_S) -> Command:
    """Return the call that registers a batcher's address; a lease of 0 removes it."""
    return _REGISTER((keys.BATCHERS,), address, int(lease_s * 1000))


def list_batchers(client: redis.Redis) -> list[str]:
    """Return the addresses of all batchers of a store, the last registered first."""
    with translating():
        seconds, microseconds = cast("tuple[int, int]", client.time())
        now_ms = seconds * 1_000 + microseconds // 1_000
        found: Any = client.zrevrangebyscore(keys.BATCHERS, "+inf", f"({now_ms}")
    return [address.decode() for address in found]


def find_batchers(client: redis.Redis) -> list[str]:
    """Return the addresses of all batchers; BatcherUnavailableError if there is none."""
    return required(list_batchers(client), where=f"the store {address_of_client(client)}")


def required(found: list[str], *, where: str) -> list[str]:
    """Return the addresses found at a place; BatcherUnavailableError if there is none."""
    if found:
        return found
    raise BatcherUnavailableError(
        f"no batcher is registered at {where}: start one with `turnstream up` or `turnstream serve "
        "batcher`, or give its address"
    )


def registered_batchers(url: str) -> Callable[[], list[str]]:
    """Return a function that calls `find_batchers` at the store at `url`."""

    def find() -> list[str]:
        with connect(url, num_retries=0, silent_s=ANSWER_S) as client:
            return find_batchers(client)

    return find
