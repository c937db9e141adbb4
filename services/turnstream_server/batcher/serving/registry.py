"""The runs that this replica takes part in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

import redis.asyncio

from turnstream.errors import RunNotFoundError, UnknownFormatError
from turnstream.store.run.configs import check_format
from turnstream_server.batcher.planner.parking import ParkedRuns
from turnstream_server.batcher.planner.planner import RunPlanner
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.bus.core.frontier import Frontier, read_frontier_async
from turnstream_server.bus.planning.groups import is_evaluating

logger = logging.getLogger(__name__)


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
            logger.warning("this replica plans nothing: %s", error)
            return
        has_ended = frontier.is_finished and not await is_evaluating(self._client, run)
        if not has_ended and not self._takes_part(run):
            self._entries[run] = self._begin(run, frontier)

    async def find(self, run: str) -> RunView:
        """Return the view of a run; from the first call on, this replica takes part in it.

        Raises:
            RunNotFoundError: the store has no such run.
            UnknownFormatError: another release wrote the run.
        """
        if not self._takes_part(run):
            frontier = await self._open(run)
            if not self._takes_part(run):  # no other call was faster
                self._entries[run] = self._begin(run, frontier)
        return self._entries[run].view

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
