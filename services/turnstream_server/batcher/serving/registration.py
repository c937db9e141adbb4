"""The address of this batcher in the store, where workers look for it."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Final

from turnstream.errors import TurnstreamError
from turnstream.store.client.cancellation import cancel_all
from turnstream.store.client.connection import connect_async
from turnstream.store.client.scripts import run_command_async
from turnstream.store.run.batchers import LEASE_S, register_command
from turnstream_server.batcher.planner.event_loop import first_of

logger = logging.getLogger(__name__)

_EVERY_S: Final = LEASE_S / 3
_CLOSE_S: Final = 1.0
"""Longest wait for the store when this replica stops."""

_ANY_HOST: Final = ("", "0.0.0.0", "[::]", "::")  # noqa: S104 - compared, not bound


class Registration:
    """Keeps the address registered while this replica runs, also after an outage of the store.

    Args:
        url: address of the store.
        address: "host:port", as workers reach this replica.
    """

    def __init__(self, url: str, address: str) -> None:
        self._client = connect_async(url, num_retries=0)
        self._address = address
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Register now, and renew the lease from now on."""
        await first_of(self._register(LEASE_S))
        self._task = asyncio.create_task(self._renew(), name="registration of the batcher")

    async def close(self) -> None:
        """Remove the address from the store, if the store answers soon."""
        if self._task is not None:
            await cancel_all([self._task])
        await first_of(self._register(0.0), asyncio.sleep(_CLOSE_S))
        await self._client.aclose()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            await self._register(LEASE_S)

    async def _register(self, lease_s: float) -> None:
        try:
            await run_command_async(self._client, register_command(self._address, lease_s=lease_s))
        except TurnstreamError as error:
            logger.debug("the address %s is not registered: %s", self._address, error)


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
