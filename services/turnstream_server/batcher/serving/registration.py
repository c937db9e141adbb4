"""The address of this batcher in the store, where workers look for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from typing import Final

import redis.asyncio

from turnstream.errors import TurnstreamError
from turnstream.store.client.scripts import run_command_async
from turnstream.store.run.batchers import LEASE_S, register_command
from turnstream_server.batcher.planner.event_loop import background, first_of

logger = logging.getLogger(__name__)

_EVERY_S: Final = LEASE_S / 3
_CLOSE_S: Final = 1.0
"""Longest wait for the store when this replica stops."""

_ANY_HOST: Final = ("", "0.0.0.0", "[::]", "::")  # noqa: S104 - compared, not bound


@contextlib.asynccontextmanager
async def registered(client: redis.asyncio.Redis, address: str) -> AsyncIterator[None]:
    """Keep "host:port" registered inside the block, also after an outage of the store."""

    async def register(lease_s: float) -> None:
        try:
            await run_command_async(client, register_command(address, lease_s=lease_s))
        except TurnstreamError as error:
            logger.debug("the address %s is not registered: %s", address, error)

    async def renew() -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            await register(LEASE_S)

    await first_of(register(LEASE_S))
    try:
        async with background(renew(), name="registration of the batcher"):
            yield
    finally:
        await first_of(register(0.0), asyncio.sleep(_CLOSE_S))


def advertised(bound: str, advertise: str) -> str:
    """Return the address at which workers reach a batcher.

    Args:
        bound: "host:port" that the server listens on.
        advertise: "host:port" or "host" that was set; "" for none.

    >>> advertised("127.0.0.1:7600", ""), advertised("0.0.0.0:7600", "batcher-3")
    ('127.0.0.1:7600', 'batcher-3:7600')
    >>> advertised("0.0.0.0:7600", "lb.example:443")
    'lb.example:443'
    """
    host, _, port = bound.rpartition(":")
    if advertise:
        return advertise if ":" in advertise else f"{advertise}:{port}"
    return f"{socket.gethostname() if host in _ANY_HOST else host}:{port}"
