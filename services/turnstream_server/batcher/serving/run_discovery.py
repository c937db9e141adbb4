"""Discovery of the runs of a store: existing ones, and each new one at once.

A process that creates or reopens a run writes its name to one stream, on which a batcher waits. The
list of runs is read at the start, and after each wait without news: it has the runs whose creator
died before it wrote the name.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import redis.asyncio

from turnstream.errors import UnavailableError
from turnstream.store.client import keys
from turnstream.store.client.connection import MAX_BLOCK_S
from turnstream.store.client.replies import translating
from turnstream.types.names import RunId
from turnstream_server.batcher.planner.event_loop import repeat

logger = logging.getLogger(__name__)

_PAGE: Final = 100
"""Names of one reply; below the number that the stream keeps."""


class RunDiscovery:
    """Finds every run of the store at first, and later each run that needs a planner.

    Args:
        client: client of the store; the read that waits holds a connection of its pool.
        on_run: called with the name of each run, and again whenever it may have been created again.
        list_every_s: longest wait for news before the list of runs is read.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        on_run: Callable[[str], Awaitable[None]],
        *,
        list_every_s: float = MAX_BLOCK_S,
    ) -> None:
        self._client = client
        self._on_run = on_run
        self._block_ms = max(1, round(list_every_s * 1000))
        self._known: set[bytes] = set()
        self._last_id: bytes | str = "0-0"
        self._has_lost_news = False

    async def read_all(self) -> None:
        """Report all runs; later news follow them."""
        with translating():
            newest: Any = await self._client.xrevrange(keys.NEWS, count=1)
        self._last_id = newest[0][0] if newest else "0-0"
        self._known = set()
        await self._read_list()

    async def follow(self) -> None:
        """Report new runs until cancelled."""
        await repeat(self._follow_once, what="new runs are not found")

    async def _follow_once(self) -> None:
        """Report the next news; after an error report all runs, because news may be lost."""
        has_lost_news, self._has_lost_news = self._has_lost_news, True
        if has_lost_news:
            await self.read_all()
            logger.info("new runs are found again")
        else:
            await self._read_news()
        self._has_lost_news = False

    async def _read_news(self) -> None:
        """Wait for the next names, and report them; read the list if there are none or too many."""
        with translating():
            reply: Any = await self._client.xread(
                {keys.NEWS: self._last_id}, count=_PAGE, block=self._block_ms
            )
        entries: list[tuple[bytes, dict[bytes, bytes]]] = reply[0][1] if reply else []
        if entries:
            self._last_id = entries[-1][0]
        names = [fields[b"n"] for _, fields in entries]
        if len(names) == _PAGE:  # there may have been more than the stream keeps
            self._known.clear()
        if len(names) in (0, _PAGE):
            await self._read_list()
        else:
            self._known.update(names)
            await self._report(names)

    async def _read_list(self) -> None:
        """Report the runs that are new, and those that are gone."""
        with translating():
            names: Any = await self._client.execute_command("SMEMBERS", keys.RUNS)
        changed = set(names) ^ self._known
        self._known = set(names)
        await self._report(sorted(changed))

    async def _report(self, names: Iterable[bytes]) -> None:
        for name in names:
            try:
                await self._on_run(RunId(keys.decode_name(name.decode())))
            except UnavailableError:
                raise
            except Exception:  # a defect of one run must not hide the others
                shown = keys.decode_name(name.decode(errors="backslashreplace"))
                logger.exception("run %s is skipped for now", shown)
                self._known.discard(name)  # it is reported again with the next list
