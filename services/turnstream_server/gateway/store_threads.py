"""Calls of the store that block, in threads with a client of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import redis

from turnstream.errors import RecordError, RejectedError, UnknownFormatError
from turnstream.store.client.connection import connect
from turnstream.store.client.deadlines import SILENT_S
from turnstream_server.keys.places import Places

NUM_THREADS: Final = 8
"""Each has one connection at most."""

_HEAVY_S: Final = 600.0
"""Longest time for which an owner has the turn."""

_Result = TypeVar("_Result")


class StoreThreads:
    """The threads of one gateway process, and the client that they share.

    Args:
        url: address of the store.
    """

    def __init__(self, url: str) -> None:
        self._client = connect(url, silent_s=SILENT_S)  # connects when it is first used
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="gateway-store")
        self._heavy = asyncio.Semaphore(1)
        self._heavy_places = Places(shared=1, alone=1, held_s=_HEAVY_S)

    async def run(self, work: Callable[[redis.Redis], _Result]) -> _Result:
        """Return the result of a function of the client, which runs in a thread.

        Raises:
            RejectedError: a stored record is damaged, or another release wrote it.
        """
        return await self._in_thread(lambda: work(self._client))

    async def run_heavy(self, work: Callable[[], _Result], *, owner: str) -> _Result:
        """Return the result of a function that needs much memory; one runs at a time.

        Owners of keys take turns.
        """
        async with self._heavy_places.lent(owner) as place:
            await place.take()
            async with self._heavy:
                return await self._in_thread(work)

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except RecordError as error:  # else it would count as an error of the request
            what = "" if isinstance(error, UnknownFormatError) else "the store is damaged: "
            raise RejectedError(f"{what}{error}") from error

    async def close(self) -> None:
        """Disconnect, once the running functions have returned."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        self._client.close()
