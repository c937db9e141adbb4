"""Finds the runs of a store: those that are there, and each that is made later, at once.

Whoever makes a run, or opens one again, writes its name to one stream. A batcher waits there, so
that to find a run costs the same however many there are. A name that was not told, because its
maker died in between, or by an older release, shows as another number of runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from turnstream.errors import TurnstreamError, UnavailableError
from turnstream.store.client import keys
from turnstream.store.client.cancellation import cancel_all
from turnstream.store.client.connection import MAX_BLOCK_S, connect_async
from turnstream.store.client.replies import translating
from turnstream.types.names import RunId

logger = logging.getLogger(__name__)

_PAGE: Final = 100
"""Names of one reply; below the number that the stream keeps."""

_AGAIN_S: Final = 1.0
"""After an error of the store."""


class RunFinder:
    """Meets every run of the store: all of them at first, and later those that need a planner.

    Args:
        url: of the store.
        meet: called with the name of a run, and again whenever it may have begun anew.
        count_every_s: longest time between two looks at the number of runs.
    """

    def __init__(
        self,
        url: str,
        meet: Callable[[str], Awaitable[None]],
        *,
        count_every_s: float = MAX_BLOCK_S,
    ) -> None:
        self._client = connect_async(url, num_retries=0)
        self._meet = meet
        self._block_ms = max(1, round(count_every_s * 1000))
        self._known: set[bytes] = set()
        self._last_news: bytes | str = "0-0"
        self._trouble = ""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Meet the runs that are there, and from now on those that come.

        Raises:
            StoreUnavailableError: the store cannot be reached.
        """
        await self._begin()
        self._task = asyncio.create_task(self._go_on(), name="search for runs")

    async def close(self) -> None:
        """Search no more."""
        if self._task is not None:
            await cancel_all([self._task])
        await self._client.aclose()

    async def _begin(self) -> None:
        """Meet all runs; what is told from now on comes behind them."""
        with translating():
            newest: Any = await self._client.xrevrange(keys.NEWS, count=1)
        self._last_news = newest[0][0] if newest else "0-0"
        self._known = set()
        await self._read_list()

    async def _go_on(self) -> None:
        """Follow the news; after any error from the beginning, as news may have been missed."""
        is_behind = False
        while True:
            try:
                if is_behind:
                    await self._begin()
                    self._note("")
                    is_behind = False
                await self._follow()
            except TurnstreamError as error:
                self._note(str(error))
            except Exception:  # a defect must not end the search
                logger.exception("the search for runs failed")
            is_behind = True
            await asyncio.sleep(_AGAIN_S)

    async def _follow(self) -> None:
        while True:
            told = await self._read_news()
            if len(told) == _PAGE:  # there may have been more than the stream keeps
                self._known.clear()
                await self._read_list()
            elif told:
                self._known.update(told)
                await self._meet_all(told)
            elif await self._num_runs() != len(self._known):
                await self._read_list()

    async def _read_news(self) -> list[bytes]:
        """The next names, or none after a while."""
        with translating():
            reply: Any = await self._client.xread(
                {keys.NEWS: self._last_news}, count=_PAGE, block=self._block_ms
            )
        entries: list[tuple[bytes, dict[bytes, bytes]]] = reply[0][1] if reply else []
        if entries:
            self._last_news = entries[-1][0]
        return [fields[b"n"] for _, fields in entries]

    async def _num_runs(self) -> int:
        with translating():
            count: Any = await self._client.execute_command("SCARD", keys.RUNS)
        return count

    async def _read_list(self) -> None:
        """Meet the runs that are new, and those that are gone; know those that are there."""
        with translating():
            names: Any = await self._client.execute_command("SMEMBERS", keys.RUNS)
        changed = set(names) ^ self._known
        self._known = set(names)
        await self._meet_all(sorted(changed))

    async def _meet_all(self, names: Iterable[bytes]) -> None:
        for name in names:
            try:
                await self._meet(RunId(keys.decode_name(name.decode())))
            except UnavailableError:
                raise
            except Exception:  # a defect of one run must not hide the others
                shown = keys.decode_name(name.decode(errors="backslashreplace"))
                logger.exception("run %s is left alone for now", shown)
                self._known.discard(name)  # to be met again with the next look at the list

    def _note(self, trouble: str) -> None:
        """Say once what ends and what begins."""
        if trouble and trouble != self._trouble:
            logger.warning("new runs are not found: %s", trouble)
        if self._trouble and not trouble:
            logger.info("new runs are found again")
        self._trouble = trouble
