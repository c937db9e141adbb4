"""Connections to the store for the calls of generators, each to one process of the store."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, NamedTuple

from redis.exceptions import ConnectionError as RedisConnectionError

from turnstream.generator.outbox.writes import StoreProcess
from turnstream.generator.requests import SCRIPTS, SINGLE_SCRIPTS
from turnstream.generator.transport.transport import first_words, parse_process
from turnstream.store.client.connection import AsyncLink
from turnstream.store.client.scripts import pack

_WAIT_S: Final = 5.0
"""Longest wait for a free connection. The caller may have timed out by then."""

_FIRST_WORDS: Final = first_words((*SCRIPTS, *SINGLE_SCRIPTS))


class StoreLink(NamedTuple):
    """A connection that never connects again on its own, and the process that it reaches."""

    link: AsyncLink
    process: StoreProcess


class StoreLinks:
    """Connections to the store, each borrowed by one request; at most `max_links`."""

    def __init__(self, url: str, *, max_links: int) -> None:
        self._url = url
        self._max_links = max_links
        self._free = asyncio.Semaphore(max_links)
        self._idle: list[StoreLink] = []
        self._is_closed = False
        self._unnamed = _new_name()

    @contextlib.asynccontextmanager
    async def borrow(self) -> AsyncIterator[StoreLink]:
        """Lend a connection to the block. An error inside ends it, and all that are idle.

        RedisError or OSError if the store cannot be reached, or all are in use for long.
        """
        await self._acquire()
        try:
            link = self._idle.pop() if self._idle else await self._opened()
            try:
                yield link
            except BaseException:
                await link.link.close()
                await self._drop_idle()
                raise
            if self._is_closed:
                await link.link.close()
            else:
                self._idle.append(link)
        finally:
            self._free.release()

    async def close(self) -> None:
        """End all idle connections, and those in use after their block."""
        self._is_closed = True
        await self._drop_idle()

    async def _acquire(self) -> None:
        try:
            async with asyncio.timeout(_WAIT_S):
                await self._free.acquire()
        except TimeoutError as error:
            message = (
                f"all {self._max_links} connections of the gateway were in use for {_WAIT_S:g} s"
            )
            raise RedisConnectionError(message) from error

    async def _opened(self) -> StoreLink:
        link = AsyncLink(self._url)
        try:
            replies = await link.exchange(pack(_FIRST_WORDS), len(_FIRST_WORDS))
            _check_loaded(replies[:-2])
        except BaseException:
            await link.close()
            raise
        process = parse_process(*replies[-2:])
        # A store that does not say its name has one until the next loss.
        return StoreLink(link, process if process.name else process._replace(name=self._unnamed))

    async def _drop_idle(self) -> None:
        """End all idle connections: they may lead to a process that is gone."""
        idle, self._idle = self._idle, []
        self._unnamed = _new_name()
        for each in idle:
            await each.link.close()


def _check_loaded(replies: Sequence[Any]) -> None:
    for reply in replies:
        if isinstance(reply, Exception):
            raise RedisConnectionError(f"the store takes no scripts: {reply}")


def _new_name() -> str:
    return f"unknown-{secrets.token_hex(8)}"
