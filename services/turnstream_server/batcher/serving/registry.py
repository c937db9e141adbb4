"""The runs of a replica: discovery of those in the store, and a planner for each.

A process that creates or reopens a run writes its name to one stream, on which a batcher waits. The
list of runs is read at the start, and after each wait without news: it has the runs whose creator
died before it wrote the name.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, NamedTuple

import redis.asyncio

from turnstream.errors import RunNotFoundError, UnavailableError, UnknownFormatError
from turnstream.store.client import keys
from turnstream.store.client.connection import MAX_BLOCK_S
from turnstream.store.client.replies import translating
from turnstream.store.client.run_ids import listed_run
from turnstream.store.run.configs import check_format
from turnstream.types.names import quoted
from turnstream_server.batcher.planner.listener import ParkedRuns
from turnstream_server.batcher.planner.planner import RunPlanner
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.ledger.core.frontier import Frontier, read_frontier_async
from turnstream_server.ledger.planning.groups import is_evaluating
from turnstream_server.loops import repeat

logger = logging.getLogger(__name__)

_PAGE: Final = 100
"""Names of one reply; below the number that the stream keeps."""


class _Entry(NamedTuple):
    view: RunView
    task: asyncio.Task[None]


class RunRegistry:
    """Views of runs, each with a planner task."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        new_planner: Callable[[str, Frontier], RunPlanner],
        parked: ParkedRuns,
    ) -> None:
        self._client = client
        self._new_planner = new_planner
        self._parked = parked
        self._entries: dict[str, _Entry] = {}

    async def take_part(self, run: str) -> None:
        """Take part in a run, unless it has ended or is gone; read a parked run again.

        An ended run needs no planner before a trainer's call names it, except for evaluations in
        progress.
        """
        if self._takes_part(run):
            self._parked.wake(run)
            return
        try:
            frontier = await self._open(run)
        except RunNotFoundError:  # the name of a deleted run may be left over
            return
        except UnknownFormatError as error:
            logger.warning("this replica does not plan a run: %s", error)
            return
        has_ended = frontier.is_finished and not await is_evaluating(self._client, run)
        if not has_ended and not self._takes_part(run):
            self._entries[run] = self._begin(run, frontier)

    async def find(self, run: str) -> RunView:
        """Return the view of a run; from the first call on, this replica takes part in it."""
        if not self._takes_part(run):
            frontier = await self._open(run)
            if not self._takes_part(run):  # no other call was faster
                self._entries[run] = self._begin(run, frontier)
        return self._entries[run].view

    def views(self) -> list[RunView]:
        """Return the runs in which this replica takes part, sorted; parked ones are last."""
        views = [entry.view for entry in [*self._entries.values()] if not entry.task.done()]
        return sorted(views, key=lambda view: (self._parked.is_parked(view.run), view.run))

    def dismiss(self) -> None:
        """Refuse all waiting calls: this replica stops."""
        for entry in self._entries.values():
            entry.view.close()

    async def close(self) -> None:
        """Stop the planners and release their leaderships."""
        tasks = [entry.task for entry in self._entries.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _open(self, run: str) -> Frontier:
        frontier = await read_frontier_async(self._client, run)
        await check_format(self._client, run)
        return frontier

    def _takes_part(self, run: str) -> bool:
        entry = self._entries.get(run)
        return entry is not None and not entry.task.done()

    def _begin(self, run: str, frontier: Frontier) -> _Entry:
        planner = self._new_planner(run, frontier)
        task = asyncio.create_task(planner.run(), name=f"planner of {run}")
        task.add_done_callback(lambda ended: self._drop(run, ended))
        return _Entry(planner.view, task)

    def _drop(self, run: str, ended: asyncio.Task[None]) -> None:
        """Drop the view of a deleted run; another run may have its name."""
        entry = self._entries.get(run)
        if entry is not None and entry.task is ended:
            del self._entries[run]


class RunDiscovery:
    """Finds every run of the store at first, and later each run that needs a planner.

    `on_run` is called again whenever the run may have been created again. After `list_every_s`
    without news, the list of runs is read.
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
        self._may_lack_news = False

    async def read_all(self) -> None:
        """Report all runs; later news follow them."""
        with translating():
            newest: Any = await self._client.xrevrange(keys.NEWS, count=1)
        self._last_id = newest[0][0] if newest else "0-0"
        self._known.clear()
        await self._read_list()

    async def follow(self) -> None:
        """Report new runs until cancelled."""
        await repeat(self._follow_once, what="new runs are not found")

    async def _follow_once(self) -> None:
        """Report the next news; after an error report all runs."""
        read = self.read_all if self._may_lack_news else self._read_news
        self._may_lack_news = True
        await read()
        self._may_lack_news = False

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
            run = listed_run(name)
            if run is None:
                logger.warning("the store lists %s, which is no name of a run", quoted(name))
                continue
            try:
                await self._on_run(run)
            except UnavailableError:
                raise
            except Exception:  # a defect of one run must not hide the others
                logger.exception("run %s is skipped for now", run)
                self._known.discard(name)  # it is reported again with the next list
