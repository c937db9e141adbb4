"""Synchronous functions of the product, run in a process of the simulated world.

The function cannot be interrupted while it waits for a reply. So it is restarted after each
reply with all replies so far, and continues with the next command.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import redis
from redis.exceptions import RedisError

from simulator.clients import AsyncClient, error_of, parsed, words_of
from simulator.values import StoreError
from simulator.world import World

_Result = TypeVar("_Result")


class _UnansweredError(BaseException):
    """A command whose reply is not known yet; nothing but `run_stepwise` may catch it."""

    def __init__(self, words: list[bytes]) -> None:
        super().__init__()
        self.words = words


class DirectClient(redis.Redis):
    """A client whose replies come from a function of the words of a command."""

    def __init__(self, ask: Callable[[list[bytes]], Any]) -> None:
        self._ask = ask

    def __del__(self) -> None:
        """There is no connection to close."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """The reply to a command."""
        words = words_of(args)
        reply = self._ask(words)
        if isinstance(reply, StoreError):
            raise error_of(reply)
        return parsed(words[0], reply, options)

    def script_load(self, script: Any) -> Any:
        """Let the store know a script."""
        return self.execute_command("SCRIPT", "LOAD", script)


def direct_client(world: World) -> redis.Redis:
    """A client of somebody outside of the world, for whom nothing goes wrong."""

    def ask(words: list[bytes]) -> Any:
        world.served = ""
        try:
            return world.store.execute(words)
        except StoreError as error:
            return error

    return DirectClient(ask)


async def run_stepwise(client: AsyncClient, act: Callable[[redis.Redis], _Result]) -> _Result:
    """Return the result of `act`, each of whose commands is an event of the world."""
    replies: list[tuple[Sequence[bytes], Any]] = []
    while True:
        known = iter(replies)

        def ask(words: list[bytes], known: Any = known) -> Any:
            asked, reply = next(known, (None, None))
            if asked is None:
                raise _UnansweredError(words)
            assert words == asked, f"{words} is asked, and before that was {asked}"
            if isinstance(reply, RedisError):
                raise reply
            return reply

        try:
            return act(DirectClient(ask))
        except _UnansweredError as unanswered:
            words = unanswered.words
        try:
            (reply,) = await client.exchange([words])
        except RedisError as error:
            reply = error
        replies.append((words, reply))
