"""The way of a publisher to its store: Redis, or a gateway over HTTP.

Errors of the way are those of the Redis client on both: a lost connection is a
`redis.ConnectionError`, a silent store a `redis.TimeoutError`, and a refused call a
`redis.ResponseError` with the error reply of the script.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from turnstream.errors import TurnstreamError
from turnstream.generator.outbox.writes import Answers, Round
from turnstream.generator.requests import ReadWaits, Request
from turnstream.optional import from_extra
from turnstream.store.client.addresses import is_http
from turnstream.store.client.deadlines import SOCKET_TIMEOUT_S
from turnstream.store.waits.bounded_call import StoreWait
from turnstream.store.waits.read_waits import parse_waits
from turnstream.store.waits.wait_snapshot import WaitSnapshot


class Link(Protocol):
    """One connection for rounds. It never repeats any, and reconnects when used."""

    async def exchange(
        self,
        sent: Round,
        *,
        timeout_s: float = SOCKET_TIMEOUT_S,
        on_sent: Callable[[], float] | None = None,
    ) -> Answers:
        """Return the answers to a round; a cancellation closes the connection.

        Args:
            sent: the round.
            timeout_s: limit of the exchange, or of its first bytes if `on_sent` is set.
            on_sent: called after each part that was sent; returns the limit from then on. So a
                slow link has time for many bytes.
        """
        ...

    async def close(self) -> None:
        """Disconnect. Safe to repeat."""
        ...


class StoreRequests(ABC):
    """Single requests of a generator; a lost connection is retried."""

    @abstractmethod
    async def reply(self, request: Request) -> Any:
        """Return the reply to a request."""

    @abstractmethod
    async def find_run(self, name: str) -> str:
        """Return the id of the run that has this name now."""


class BoundedCalls:
    """The requests of one wait, each of which ends by the deadline of the wait.

    Args:
        requests: the way to the store.
        wait: the wait, which names the awaited thing in errors.
    """

    def __init__(self, requests: StoreRequests, wait: StoreWait) -> None:
        self._requests = requests
        self.wait = wait

    async def reply(self, request: Request) -> Any:
        """Return the reply to a request."""
        async with self.wait.bounded_async():
            return await self._requests.reply(request)

    async def find_run(self, name: str) -> str:
        """Return the id of the run that has this name now."""
        async with self.wait.bounded_async():
            return await self._requests.find_run(name)

    async def read_waits(self, run: str) -> WaitSnapshot | None:
        """Return the state of the run; None if the store does not return it in time."""
        with contextlib.suppress(TurnstreamError):
            async with self.wait.bounded_async():
                return parse_waits(run, await self._requests.reply(ReadWaits(run)))
        return None


class Transport(StoreRequests):
    """The way of one publisher, which connects at its first use, in one event loop."""

    @abstractmethod
    def link(self) -> Link:
        """Return a new connection for rounds."""

    @abstractmethod
    async def close(self) -> None:
        """Disconnect. Safe to repeat."""


def transport_to(url: str, *, writer: str) -> Transport:
    """Return the way of a writer to an address of a store or a gateway."""
    if is_http(url):
        with from_extra("http", needed_by="an address that begins with http"):
            from turnstream.generator.transport.http_transport import HttpTransport
        return HttpTransport(url, writer=writer)
    from turnstream.generator.transport.redis_transport import RedisTransport

    return RedisTransport(url)
