"""The way of a publisher to its store: Redis, or a gateway over HTTP.

Errors of the way are those of the Redis client on both: a lost connection is a
`redis.ConnectionError`, a silent store a `redis.TimeoutError`, and a refused call a
`redis.ResponseError` with the error reply of the script.
"""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol, cast

import redis.asyncio
from redis.exceptions import ResponseError

from turnstream.errors import TurnstreamError
from turnstream.generator.outbox.writes import Answers, Round, StoreProcess
from turnstream.generator.requests import SCRIPTS, AwaitWake, ReadTurns, ReadWaits, Request
from turnstream.optional import from_extra
from turnstream.store.client import keys
from turnstream.store.client.addresses import is_http
from turnstream.store.client.connection import AsyncLink, connect_async
from turnstream.store.client.deadlines import SOCKET_TIMEOUT_S
from turnstream.store.client.replies import error_text, translate
from turnstream.store.client.run_ids import find_run_async, parse_incarnation
from turnstream.store.client.scripts import Argument, Script, pack, run_command_async
from turnstream.store.client.server_checks import SETTINGS
from turnstream.store.waits.bounded_call import StoreWait
from turnstream.store.waits.read_waits import parse_waits
from turnstream.store.waits.wait_snapshot import WaitSnapshot

_RUN_ID: Final = re.compile(rb"\brun_id:(\w+)")


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

        `on_sent` is called after each part that was sent, and returns the time limit from then on.
        So a slow link has time for many bytes.
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
    """The requests of one wait, each of which ends by the deadline of the wait."""

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


def first_words(scripts: Iterable[Script]) -> Sequence[Sequence[Argument]]:
    """Return the first commands of a connection: load scripts, and read what the server is."""
    return (
        *[("SCRIPT", "LOAD", script.source) for script in scripts],
        ("INFO", "server"),
        ("CONFIG", "GET", *SETTINGS),
    )


_FIRST_WORDS: Final = first_words(SCRIPTS)


def pack_round(sent: Round) -> bytes:
    """Return the bytes to send."""
    words = sent.words
    if sent.is_grouped:
        words = [("MULTI",), *words, ("EXEC",)]
    if sent.sought:
        words.append(("GET", keys.incarnation_key(sent.sought)))
    return pack([*(_FIRST_WORDS if sent.is_first else ()), *words])


def num_replies(sent: Round) -> int:
    """Return the number of replies to a round."""
    num_first = len(_FIRST_WORDS) if sent.is_first else 0
    return num_first + len(sent.calls) + (2 if sent.is_grouped else 0) + bool(sent.sought)


def parse_replies(sent: Round, replies: Sequence[Any]) -> Answers:
    """Return the answers to a round from the replies of a server, values and ResponseErrors."""
    left = [*replies]
    run = _parse_run(sent.sought, left.pop()) if sent.sought else None
    store, trouble = None, ""
    if sent.is_first:
        first, left = left[: len(_FIRST_WORDS)], left[len(_FIRST_WORDS) :]
        store = parse_process(*first[-2:])
        trouble = next((error_text(r) for r in first[:-2] if isinstance(r, ResponseError)), "")
    is_aborted = sent.is_grouped and not isinstance(left[-1], list)
    if sent.is_grouped:
        left = parse_transaction(left)
    return Answers(left, store=store, run=run, trouble=trouble, is_aborted=is_aborted)


def parse_transaction(replies: Sequence[Any]) -> list[Any]:
    """Return the reply of each command between MULTI and EXEC.

    If nothing was carried out, it is because of the commands that were refused, if any was.

    >>> parse_transaction([b"OK", b"QUEUED", b"QUEUED", [1, 2]])
    [1, 2]
    """
    _, *queued, executed = replies
    if isinstance(executed, list):
        return cast("list[Any]", executed)
    return [each if isinstance(each, Exception) else executed for each in queued]


def parse_process(info: Any, settings: Any) -> StoreProcess:
    r"""Return the process of a store from its replies to INFO and CONFIG GET.

    >>> parse_process(b"# Server\r\nrun_id:7f3a\r\n", [b"appendfsync", b"always"])
    StoreProcess(name='7f3a', syncs_each_write=True)
    """
    found = _RUN_ID.search(info) if isinstance(info, bytes) else None
    name = found[1].decode() if found else ""
    if isinstance(settings, Exception):
        return StoreProcess(name, None)
    words = [word.decode() for word in settings] if isinstance(settings, list) else []
    known = dict(zip(words[::2], words[1::2], strict=True))
    return StoreProcess(name, known.get("appendfsync") == "always")


def _parse_run(name: str, reply: Any) -> str | TurnstreamError:
    if isinstance(reply, ResponseError):
        return translate(reply)
    return parse_incarnation(name, reply)


class RedisLink:
    """A connection for rounds, see `Link`."""

    def __init__(self, url: str) -> None:
        self._link = AsyncLink(url)

    async def exchange(
        self,
        sent: Round,
        *,
        timeout_s: float = SOCKET_TIMEOUT_S,
        on_sent: Callable[[], float] | None = None,
    ) -> Answers:
        """Return the answers to a round."""
        replies = await self._link.exchange(
            pack_round(sent), num_replies(sent), timeout_s=timeout_s, on_sent=on_sent
        )
        return parse_replies(sent, replies)

    async def close(self) -> None:
        """Disconnect. Safe to repeat."""
        await self._link.close()


class RedisRequests(StoreRequests):
    """Single requests over a client of the store."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client

    async def reply(self, request: Request) -> Any:
        """Return the reply to a request."""
        match request:
            case ReadTurns():
                return await self._stored_turns(request)
            case AwaitWake(run, wake_id, timeout_ms):
                wake = keys.run_keys(run).wake
                words = ("XREAD", "BLOCK", timeout_ms, "STREAMS", wake, wake_id)
                return await self._execute(*words)
            case _:
                return await run_command_async(self._client, request.command)

    async def find_run(self, name: str) -> str:
        """Return the id of the run that has this name now."""
        return await find_run_async(self._client, name)

    async def _stored_turns(self, request: ReadTurns) -> tuple[list[bytes], int | None, bool]:
        payload = keys.trajectory_keys(request.run, request.trajectory_id)
        entries = await self._execute("XRANGE", payload.turns, "-", "+")
        # Read last: no other writer has added to the turns if the lease is still ours.
        epoch, sealed = await self._execute("HMGET", payload.meta, "epoch", "sealed")
        records = [fields[b"r"] for _, fields in entries]
        return records, int(epoch) if epoch else None, sealed == b"1"

    async def _execute(self, *words: Argument) -> Any:
        return await cast("Any", self._client).execute_command(*words)


class RedisTransport(RedisRequests, Transport):
    """The way of a publisher over Redis."""

    def __init__(self, url: str) -> None:
        super().__init__(connect_async(url))
        self._url = url

    def link(self) -> RedisLink:
        """Return a new connection for rounds."""
        return RedisLink(self._url)

    async def close(self) -> None:
        """Disconnect. Safe to repeat."""
        await self._client.aclose()


def transport_to(url: str, *, writer: str) -> Transport:
    """Return the way of a writer to an address of a store or a gateway."""
    if is_http(url):
        with from_extra("http", needed_by="an address that begins with http"):
            from turnstream.generator.transport.http_transport import HttpTransport
        return HttpTransport(url, writer=writer)
    return RedisTransport(url)
