"""Where batchers answer: each registers its address in the store, under a lease."""

from __future__ import annotations

import time
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

_RETRY_S: Final = 0.2

ANSWER_S: Final = 2.0
"""Longest wait for a store that is silent, while a call to a batcher waits for its address."""

Target = str | Callable[[], Sequence[str]]
"""Addresses of batchers, with commas between them, or a function that returns the present ones."""

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


def registered_batchers(url: str) -> Callable[[], list[str]]:
    """Return a function that reads the addresses of all batchers from the store at `url`."""

    def find() -> list[str]:
        with connect(url, num_retries=0, silent_s=ANSWER_S) as client:
            return list_batchers(client)

    return find


def wait_for_batchers(client: redis.Redis, *, timeout_s: float) -> list[str]:
    """Return the addresses of all batchers, once there is one."""
    where = f"the store {address_of_client(client)}"
    return first_found(lambda: list_batchers(client), where=where, timeout_s=timeout_s)


def first_found(find: Callable[[], list[str]], *, where: str, timeout_s: float) -> list[str]:
    """Return the addresses that a function finds, once there is one.

    Raises:
        BatcherUnavailableError: there was none `where` it reads for `timeout_s`.
    """
    ends_s = time.monotonic() + timeout_s
    while not (found := find()):
        if time.monotonic() >= ends_s:
            raise BatcherUnavailableError(
                f"no batcher is registered at {where}: start one "
                "with `turnstream up` or `turnstream serve batcher`, or give its address"
            )
        time.sleep(_RETRY_S)
    return found
