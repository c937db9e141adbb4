"""Clients of the store in memory, where the code expects those of redis-py and the links of ours.

Replies go through the callbacks of redis-py itself, so that they look as from a server.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Self, TypeVar

import hiredis
import redis
import redis.asyncio
from redis._parsers import Encoder
from redis._parsers.base import BaseParser
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from simulator.processes import Process, Request
from simulator.store.values import StoreError
from simulator.world import World

_CALLBACKS = {
    name.encode(): callback for name, callback in redis.Redis(protocol=2).response_callbacks.items()
}
_ENCODER = Encoder("utf-8", "strict", decode_responses=False)
_Result = TypeVar("_Result")


def words_of(arguments: Sequence[Any]) -> list[bytes]:
    words: list[Any] = [_ENCODER.encode(word) for word in arguments]
    words[0] = words[0].upper()
    return words


def error_of(error: StoreError) -> Exception:
    return BaseParser.parse_error(str(error))


def _parsed(words: Sequence[bytes], reply: Any, options: dict[str, Any]) -> Any:
    if isinstance(reply, StoreError):
        return error_of(reply)
    callback = _CALLBACKS.get(words[0])
    if callback is None or isinstance(reply, Exception):
        return reply
    options.pop("keys", None)
    return callback(reply, **options)


def _raised(reply: Any) -> Any:
    if isinstance(reply, Exception):
        raise reply
    return reply


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
        return _raised(_parsed(words, reply, options))

    async def exchange(
        self, commands: Sequence[Sequence[bytes]], *, is_whole: bool = False
    ) -> list[Any]:
        process = self._process
        while commands:
            try:
                if self._start != process.world.store.num_starts:
                    await self._connect()
                return await sent(process, commands, start=self._start, is_whole=is_whole)
            except RedisConnectionError:
                self._start = 0
                if process.is_dead or process.world.rng.random() < 0.5:
                    raise
        return []

    async def _connect(self) -> None:
        start = self._process.world.store.num_starts
        meet = self.connection_pool.connection_kwargs.get("redis_connect_func")
        if meet is not None:
            await meet(_NewConnection(self._process, start))
        self._start = start

    async def script_load(self, script: Any) -> Any:
        return await self.execute_command("SCRIPT", "LOAD", script)

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Any:
        return _Pipeline(partial(self.exchange, is_whole=transaction))

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
        self._sent = words_of(args)

    async def read_response(self) -> Any:
        (reply,) = await sent(self._process, [self._sent], start=self._start)
        return reply

    async def disconnect(self) -> None:
        """There is no socket to close."""


class _Pipeline:
    """Commands that are sent together, by a function from their words to their raw replies."""

    def __init__(self, send: Callable[[list[list[bytes]]], Any]) -> None:
        self._send = send
        self._commands: list[tuple[list[bytes], dict[str, Any]]] = []

    def execute_command(self, *args: Any, **options: Any) -> Self:
        self._commands.append((words_of(args), options))
        return self

    def execute(self, raise_on_error: bool = True) -> Any:
        """Return the replies, or a coroutine of them where the function is asynchronous."""
        raw = self._send([words for words, _ in self._commands])
        if not inspect.isawaitable(raw):
            return self._replies(raw, raise_on_error=raise_on_error)

        async def replies() -> list[Any]:
            return self._replies(await raw, raise_on_error=raise_on_error)

        return replies()

    def _replies(self, raw: Sequence[Any], *, raise_on_error: bool) -> list[Any]:
        pairs = zip(self._commands, raw, strict=True)
        replies = [_parsed(words, reply, options) for (words, options), reply in pairs]
        return [_raised(each) if raise_on_error else each for each in replies]


def sent(
    process: Process,
    commands: Sequence[Sequence[bytes]],
    *,
    start: int,
    is_whole: bool = False,
    may_repeat: bool = True,
) -> asyncio.Future[list[Any]]:
    answered: asyncio.Future[list[Any]] = process.loop.create_future()
    process.world.send(Request(process, commands, answered, start, is_whole, may_repeat))
    return answered


class SyncClient(redis.Redis):
    """A client whose replies, errors among them, come from a function of the words of a command."""

    def __init__(self, carry_out: Callable[[list[bytes]], Any]) -> None:
        self._carry_out = carry_out

    def __del__(self) -> None:
        """There is no connection to close."""

    def close(self) -> None:
        """There is no connection to close."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        words = words_of(args)
        return _raised(_parsed(words, self._carry_out(words), options))

    def script_load(self, script: Any) -> Any:
        return self.execute_command("SCRIPT", "LOAD", script)

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Any:
        return _Pipeline(lambda commands: [*map(self._carry_out, commands)])


def direct_client(world: World) -> SyncClient:
    """Return a client from outside of the world, for which nothing goes wrong."""

    def carry_out(words: list[bytes]) -> Any:
        world.served = ""
        return world.reply(words)

    return SyncClient(carry_out)


def thread_client(process: Process) -> SyncClient:
    """Return a client for another thread of a process: its calls are carried out at once."""
    return SyncClient(partial(_reply_in_thread, process))


def _reply_in_thread(process: Process, words: Sequence[bytes]) -> Any:
    if process.is_dead:
        raise RedisConnectionError("the process is dead")
    return process.world.reply(words)


class _UnansweredError(BaseException):
    """A command whose reply is not known yet; nothing but `run_stepwise` may catch it."""

    def __init__(self, words: list[bytes]) -> None:
        super().__init__()
        self.words = words


async def run_stepwise(client: AsyncClient, act: Callable[[redis.Redis], _Result]) -> _Result:
    """Return the result of a synchronous function, each of whose commands is an event of the world.

    The function cannot be interrupted while it waits for a reply. So it is restarted after each
    reply with all replies so far, and continues with the next command.
    """
    replies: list[tuple[Sequence[bytes], Any]] = []
    while True:
        known = iter(replies)

        def carry_out(words: list[bytes], known: Any = known) -> Any:
            asked, reply = next(known, (None, None))
            if asked is None:
                raise _UnansweredError(words)
            assert words == asked, f"{words} is asked, and before that was {asked}"
            return reply

        try:
            return act(SyncClient(carry_out))
        except _UnansweredError as unanswered:
            words = unanswered.words
        try:
            (reply,) = await client.exchange([words])
        except RedisError as error:
            reply = error
        replies.append((words, reply))


class AsyncLinkInMemory:
    """In place of `turnstream.store.client.connection.AsyncLink`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._start = 0  # the store's start of the connection; 0 without one

    async def exchange(self, data: bytes, num_replies: int, **_: Any) -> list[Any]:
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
        replies = [_reply_in_thread(self._process, words) for words in _commands(data)]
        return [error_of(each) if isinstance(each, StoreError) else each for each in replies]

    def close(self) -> None:
        """There is no connection to close."""


def _commands(data: bytes) -> Iterator[list[bytes]]:
    reader = hiredis.Reader()
    reader.feed(data)
    while (words := reader.gets()) is not False:
        yield words
