"""Discovery of the runs of a store: existing ones, and each new one at once.

A process that creates or reopens a run writes its name to one stream, on which a batcher waits. So
the cost does not grow with the number of runs. If a name is missing there, because its creator died
in between or has an older release, the number of runs differs.
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
    """Finds every run of the store at first, and later each run that needs a planner.

    Args:
        url: address of the store.
        meet: called with the name of a run, and again whenever it may have been created again.
        count_every_s: longest time between two reads of the number of runs.
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
        """Meet the runs that are there, and from now on those that come."""
        await self._begin()
        self._task = asyncio.create_task(self._go_on(), name="search for runs")

    async def close(self) -> None:
        """Search no more."""
        if self._task is not None:
            await cancel_all([self._task])
        await self._client.aclose()

    async def _begin(self) -> None:
        """Find all runs; later news come after them."""
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
