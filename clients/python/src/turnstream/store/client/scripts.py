"""Scripts, the calls of scripts, and running them, in sync and asyncio programs.

Every script is idempotent: a call whose reply was lost is sent again as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.resources
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import redis
import redis.asyncio
from redis.exceptions import NoScriptError, RedisError

from turnstream.errors import RunNotFoundError, StoreFullError
from turnstream.store.client.fullness import parse_bytes
from turnstream.store.client.keys import is_of_run, run_keys, run_of
from turnstream.store.client.replies import translate, translating
from turnstream.store.client.run_ids import no_such_run
from turnstream.store.client.stored_values import StoredHash

Argument = str | bytes | int | memoryview
"""Types of keys and arguments of scripts."""

_INCLUDE = re.compile(r"^-- include: (?:([\w.]+)/)?(\w+)\.lua$", re.MULTILINE)


class Script:
    """A Lua file of a package's `lua` folder.

    A line `-- include: other.lua`, or `-- include: package/other.lua`, is replaced by the lines of
    that file after the first, once in a script.

    Attributes:
        source: the text; its header lists the arguments and the reply.
        sha: its name for EVALSHA.
    """

    __slots__ = ("name", "sha", "source")

    def __init__(self, name: str, package: str) -> None:
        self.name = name
        self.source = _read(name, package, set())
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()

    def __call__(self, keys: Sequence[str], *args: Argument) -> Command:
        """Return the call of this script; nothing is sent."""
        return Command(self, tuple(keys), args)


def _read(name: str, package: str, included: set[str]) -> str:
    """Return the text of a script or of a part; empty for a part that is included already."""
    if name in included:
        return ""
    included.add(name)
    path = importlib.resources.files(package) / "lua" / f"{name}.lua"
    text = path.read_text(encoding="utf-8")

    def part(line: re.Match[str]) -> str:
        return _read(line[2], line[1] or package, included).partition("\n")[2]

    return _INCLUDE.sub(part, text)


class Command(NamedTuple):
    """One call of a script, not yet sent."""

    script: Script
    keys: tuple[str, ...]
    args: tuple[Argument, ...]

    @property
    def words(self) -> tuple[Argument, ...]:
        """Return the words of the command for the server."""
        return ("EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.args)


def pack(calls: Iterable[Sequence[Argument]]) -> bytes:
    """Return commands in the words of the Redis protocol, ready for a socket.

    One join: twice as fast as the client's own pipelines, which pack word by word.
    """
    parts: list[bytes | memoryview] = []
    for words in calls:
        parts.append(b"*%d\r\n" % len(words))
        for word in words:
            if isinstance(word, str):
                word = word.encode()
            elif isinstance(word, int):
                word = b"%d" % word
            parts += (b"$%d\r\n" % len(word), word, b"\r\n")
    return b"".join(parts)


def run_command(client: redis.Redis, command: Command) -> Any:
    """Call a script and return its reply."""
    try:
        with _translating(command):
            try:
                return client.execute_command(*command.words)
            except NoScriptError:
                client.script_load(command.script.source)
                return client.execute_command(*command.words)
    except StoreFullError as error:
        if not is_of_run(command.keys[0]):
            raise
        with translating():
            memory: Any = client.info("memory")
            budget: Any = client.hgetall(_budget_of(command))
        raise _full(error, memory, StoredHash(_budget_of(command), budget)) from error


def run_commands(client: redis.Redis, commands: Sequence[Command]) -> list[Any]:
    """Return the replies of scripts that are called in one round trip, refusals among them."""
    with translating():
        replies = _pipeline(client, commands).execute(raise_on_error=False)
        if unknown := _from_unknown(replies, commands):
            for source in {command.script.source for command in unknown}:
                client.script_load(source)
            replies[-len(unknown) :] = _pipeline(client, unknown).execute(raise_on_error=False)
    return [_translated(*each) for each in zip(replies, commands, strict=True)]


async def run_command_async(client: redis.asyncio.Redis, command: Command) -> Any:
    """Call a script like `run_command`, for asyncio."""
    try:
        with _translating(command):
            try:
                return await client.execute_command(*command.words)
            except NoScriptError:
                await client.script_load(command.script.source)
                return await client.execute_command(*command.words)
    except StoreFullError as error:
        if not is_of_run(command.keys[0]):
            raise
        with translating():
            memory: Any = await client.info("memory")
            budget: Any = await client.execute_command("HGETALL", _budget_of(command))
        raise _full(error, memory, StoredHash(_budget_of(command), budget)) from error


async def run_commands_async(client: redis.asyncio.Redis, commands: Sequence[Command]) -> list[Any]:
    """Call scripts like `run_commands`, for asyncio."""
    with translating():
        replies = await _pipeline(client, commands).execute(raise_on_error=False)
        if unknown := _from_unknown(replies, commands):
            for source in {command.script.source for command in unknown}:
                await client.script_load(source)
            again = await _pipeline(client, unknown).execute(raise_on_error=False)
            replies[-len(unknown) :] = again
    return [_translated(*each) for each in zip(replies, commands, strict=True)]


def _pipeline(client: redis.Redis | redis.asyncio.Redis, commands: Sequence[Command]) -> Any:
    pipeline = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command.words)
    return pipeline


def _from_unknown(replies: Sequence[Any], commands: Sequence[Command]) -> Sequence[Command]:
    """Return the calls from the first script on that the server did not know.

    Later calls may have been refused because it was left out, so all of them are sent again;
    finished ones are answered as duplicates.
    """
    for position, reply in enumerate(replies):
        if isinstance(reply, NoScriptError):
            return commands[position:]
    return ()


@contextlib.contextmanager
def _translating(command: Command) -> Iterator[None]:
    try:
        with translating():
            yield
    except RunNotFoundError as error:
        raise no_such_run(run_of(command.keys[0])) from error


def _budget_of(command: Command) -> str:
    return run_keys(run_of(command.keys[0])).budget


def _full(error: StoreFullError, memory: Mapping[str, Any], budget: StoredHash) -> StoreFullError:
    """Return the error with the bytes used and allowed, and what holds them."""
    used, allowed = int(memory.get("used_memory", 0)), int(memory.get("maxmemory", 0))
    known = parse_bytes(budget, used=used, allowed=allowed)
    return StoreFullError(known.why_refused or error.message, retry_after_s=error.retry_after_s)


def _translated(reply: Any, command: Command) -> Any:
    if not isinstance(reply, (RedisError, OSError)):
        return reply
    error = translate(reply)
    return no_such_run(run_of(command.keys[0])) if isinstance(error, RunNotFoundError) else error
