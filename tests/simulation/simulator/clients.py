"""Clients of the store in memory, where the code expects those of redis-py and the links of ours.

Replies go through the callbacks of redis-py itself, so that they look as from a server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Self

import redis
import redis.asyncio
from redis._parsers.base import BaseParser
from redis.exceptions import ConnectionError as RedisConnectionError

from simulator.processes import Process, Request
from simulator.store import Store
from simulator.values import StoreError

_CALLBACKS = {
    name.encode(): callback for name, callback in redis.Redis(protocol=2).response_callbacks.items()
}


def words_of(arguments: Sequence[Any]) -> list[bytes]:
    """Return a command as the words that a server receives."""
    words = [
        word.encode() if type(word) is str else word if type(word) is bytes else _word(word)
        for word in arguments
    ]
    words[0] = words[0].upper()
    return words


def _word(argument: Any) -> bytes:
    """Return the bytes of an argument that is neither bytes nor plain text."""
    if isinstance(argument, str):  # a member of an enumeration
        return argument.encode()
    return repr(argument).encode() if isinstance(argument, int | float) else bytes(argument)


def error_of(error: StoreError) -> Exception:
    """Return the exception that redis-py makes of an error reply."""
    return BaseParser.parse_error(str(error))


def parsed(name: bytes, reply: Any, options: dict[str, Any]) -> Any:
    """A reply as redis-py gives it."""
    callback = _CALLBACKS.get(name)
    if callback is None:
        return reply
    options.pop("keys", None)
    return callback(reply, **options)


class AsyncClient(redis.asyncio.Redis):
    """A client in one process; every call is an event of its world.

    It has one connection, which is opened again after a loss. By chance the client then resends the
    unanswered commands.
    """

    def __init__(self, process: Process) -> None:  # connects when it is first used
        self._process = process
        self._start = 0  # the store's start of the connection
        self.connection_pool: Any = SimpleNamespace(connection_kwargs={})

    def __del__(self, *_: Any) -> None:
        """There is no connection to close."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        words = words_of(args)
        (reply,) = await self.exchange([words])
        if type(reply) is StoreError:
            raise error_of(reply)
        return parsed(words[0], reply, options)

    async def exchange(
        self, commands: Sequence[Sequence[bytes]], *, is_whole: bool = False
    ) -> list[Any]:
        """Send commands and wait for their replies."""
        process = self._process
        while True:
            try:
                if self._start != process.world.store.num_starts:
                    await self._connect()
                return await sent(process, commands, start=self._start, is_whole=is_whole)
            except RedisConnectionError:
                self._start = 0
                if process.is_dead or process.world.rng.random() < 0.5:
                    raise

    async def _connect(self) -> None:
        start = self._process.world.store.num_starts
        meet = self.connection_pool.connection_kwargs.get("redis_connect_func")
        if meet is not None:
            await meet(_NewConnection(self._process, start))
        self._start = start

    async def script_load(self, script: Any) -> Any:
        return await self.execute_command("SCRIPT", "LOAD", script)

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Any:
        return AsyncPipeline(self, is_whole=transaction)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """There is no connection to close."""


class _NewConnection:
    """The argument of `redis_connect_func`."""

    def __init__(self, process: Process, start: int) -> None:
        self._process = process
        self._start = start
        self._sent: list[bytes] = []

    async def on_connect(self) -> None:
        """Nothing: there is no socket to set up."""

    async def send_command(self, *args: Any, check_health: bool) -> None:
        """Send a command."""
        self._sent = words_of(args)

    async def read_response(self) -> Any:
        """The reply to it."""
        (reply,) = await sent(self._process, [self._sent], start=self._start)
        return reply

    async def disconnect(self) -> None:
        """There is no socket to close."""


class AsyncPipeline:
    """Commands that are sent together."""

    def __init__(self, client: AsyncClient, *, is_whole: bool) -> None:
        self._client = client
        self._is_whole = is_whole
        self._commands: list[tuple[list[bytes], dict[str, Any]]] = []

    def execute_command(self, *args: Any, **options: Any) -> Self:
        """Add a command."""
        self._commands.append((words_of(args), options))
        return self

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Send them; the replies."""
        if not self._commands:
            return []
        commands = [words for words, _ in self._commands]
        raw = await self._client.exchange(commands, is_whole=self._is_whole)
        replies: list[Any] = []
        for (words, options), reply in zip(self._commands, raw, strict=True):
            if isinstance(reply, StoreError):
                if raise_on_error:
                    raise error_of(reply)
                replies.append(error_of(reply))
            else:
                replies.append(parsed(words[0], reply, options))
        return replies


def sent(
    process: Process,
    commands: Sequence[Sequence[bytes]],
    *,
    start: int,
    is_whole: bool = False,
    may_repeat: bool = True,
) -> asyncio.Future[list[Any]]:
    """Send commands; the replies that are to come."""
    answered: asyncio.Future[list[Any]] = process.loop.create_future()
    process.world.send(Request(process, commands, answered, start, is_whole, may_repeat))
    return answered


class SyncClient:
    """A client for what another thread of a process does: carried out on the spot."""

    def __init__(self, process: Process | None, store: Store) -> None:
        self._process = process
        self._store = store

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Carry a command out."""
        if self._process is not None and self._process.is_dead:
            raise RedisConnectionError("the process is dead")
        words = words_of(args)
        try:
            reply = self._store.execute(words)
        except StoreError as error:
            raise error_of(error) from None
        return parsed(words[0], reply, options)

    def script_load(self, script: Any) -> Any:
        """Let the store know a script."""
        return self.execute_command("SCRIPT", "LOAD", script)

    def pipeline(self, transaction: bool = True) -> SyncPipeline:
        """Commands that are sent together."""
        return SyncPipeline(self)

    def close(self) -> None:
        """There is no connection to close."""


class SyncPipeline:
    """Commands that are sent together."""

    def __init__(self, client: SyncClient) -> None:
        self._client = client
        self._commands: list[Sequence[Any]] = []

    def execute_command(self, *args: Any) -> None:
        """Add a command."""
        self._commands.append(args)

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Carry them out."""
        replies: list[Any] = []
        for args in self._commands:
            try:
                replies.append(self._client.execute_command(*args))
            except redis.ResponseError as error:
                if raise_on_error:
                    raise
                replies.append(error)
        return replies


class AsyncLinkInMemory:
    """In place of `turnstream.store.client.connection.AsyncLink`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._start = 0  # the store's start of the connection; 0 without one

    async def exchange(self, data: bytes, num_replies: int) -> list[Any]:
        """Send packed commands; their replies, errors among them."""
        commands = [*_commands(data)]
        first = next((i for i, words in enumerate(commands) if words[0] == b"MULTI"), None)
        if first is not None:
            commands = [*commands[:first], *commands[first + 1 : -1]]
        is_whole = first is not None
        start, self._start = self._start or self._process.world.store.num_starts, 0
        raw = await sent(self._process, commands, start=start, is_whole=is_whole, may_repeat=False)
        self._start = start
        replies = [error_of(each) if isinstance(each, StoreError) else each for each in raw]
        if first is None:
            return replies
        grouped = replies[first:]
        return [*replies[:first], b"OK", *[b"QUEUED"] * len(grouped), grouped]

    async def close(self) -> None:
        """There is no connection to close."""


class LinkInMemory:
    """A `turnstream.store.client.connection.Link` for threads that calls the server at once."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def exchange(self, data: bytes, num_replies: int) -> list[Any]:
        """Carry packed commands out; their replies, errors among them."""
        if self._process.is_dead:
            raise RedisConnectionError("the process is dead")
        replies: list[Any] = []
        for words in _commands(data):
            try:
                replies.append(self._process.world.store.execute(words))
            except StoreError as error:
                replies.append(error_of(error))
        return replies

    def close(self) -> None:
        """There is no connection to close."""


def _commands(data: bytes) -> Iterator[list[bytes]]:
    at = 0
    while at < len(data):
        end = data.index(b"\r\n", at)
        num_words = int(data[at + 1 : end])
        at = end + 2
        words: list[bytes] = []
        for _ in range(num_words):
            end = data.index(b"\r\n", at)
            length = int(data[at + 1 : end])
            words.append(data[end + 2 : end + 2 + length])
            at = end + 4 + length
        yield words
