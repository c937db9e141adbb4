"""The way of a publisher to its store: Redis, or a gateway over HTTP.

Errors of the way are those of the Redis client on both: a lost connection is a
`redis.ConnectionError`, a silent store a `redis.TimeoutError`, and a refused call a
`redis.ResponseError` with the error reply of the script.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from turnstream.generator.outbox.rounds import Answers, Round
from turnstream.generator.requests import ReadTurns, ScriptRequest
from turnstream.optional import from_extra
from turnstream.store.client.addresses import is_http
from turnstream.store.client.deadlines import SOCKET_TIMEOUT_S


class StoredTurns(NamedTuple):
    """The stored records of a trajectory.

    Attributes:
        records: encoded turns, and the seal if `is_sealed`.
        epoch: lease epoch of its writer, read after the records; None if it has none.
    """

    records: list[bytes]
    epoch: int | None
    is_sealed: bool


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
    async def reply(self, request: ScriptRequest) -> Any:
        """Return the reply of the script of a request."""

    @abstractmethod
    async def find_run(self, name: str) -> str:
        """Return the id of the run that has this name now."""

    @abstractmethod
    async def read_turns(self, request: ReadTurns) -> StoredTurns:
        """Return the stored records of a trajectory."""

    @abstractmethod
    async def wait_until_woken(self, run: str, wake_id: str, *, timeout_s: float) -> None:
        """Return when the run's wake stream is beyond this id, or after `timeout_s`."""


class Transport(StoreRequests):
    """The way of one publisher, which connects at its first use, in one event loop."""

    @abstractmethod
    def link(self) -> Link:
        """Return a new connection for rounds."""

    @abstractmethod
    async def close(self) -> None:
        """Disconnect. Safe to repeat."""


def transport_to(url: str, *, writer: str) -> Transport:
    """Return the way of a writer to an address of a store or a gateway.

    Raises:
        MissingExtraError: the package for HTTP is not installed.
    """
    if is_http(url):
        with from_extra("http", needed_by="an address that begins with http"):
            from turnstream.generator.transport.http_transport import HttpTransport
        return HttpTransport(url, writer=writer)
    from turnstream.generator.transport.redis_transport import RedisTransport

    return RedisTransport(url)
