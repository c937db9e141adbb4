"""The event loop of a batcher: races, loops, and the share of each run in its time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from turnstream.errors import TurnstreamError
from turnstream.store.client.backoff import pause_after
from turnstream.store.client.cancellation import cancel_all
from turnstream_server.bus.core.scan import EventEntry

logger = logging.getLogger(__name__)

FOLD_SLICE: Final = 100
"""Weight of the events that are folded before the event loop runs other tasks: about 2 ms."""

BYTES_PER_WEIGHT: Final = 300
"""Bytes of an event's record that weigh as much as another event."""

Result = TypeVar("Result")


async def first_of(*works: Coroutine[Any, Any, Result]) -> Result:
    """Return the first result, or raise the first error; cancel the rest.

    The works run in their own tasks. Calls of the Redis client belong in such a work, also a single
    one: see `cancel_all`.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        await cancel_all(tasks)


@contextlib.asynccontextmanager
async def background(work: Coroutine[Any, Any, None], *, name: str) -> AsyncIterator[None]:
    """Run a coroutine in a task, which is cancelled at the end of the block."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        await cancel_all([task])


async def repeat(work: Callable[[], Awaitable[object]], *, what: str) -> None:
    """Call `work` again and again until cancelled, with pauses after errors.

    Args:
        work: waits for something, and handles it.
        what: sentence of the log that names the failure.
    """
    num_failures, trouble = 0, ""
    while True:
        try:
            await work()
        except TurnstreamError as error:
            if str(error) != trouble:
                logger.warning("%s: %s", what, error)
            trouble = str(error)
        except Exception:  # a defect in one call must not stop the loop
            logger.exception("%s", what)
        else:
            num_failures, trouble = 0, ""
            continue
        num_failures += 1
        await asyncio.sleep(pause_after(num_failures))


class LoopShare:
    """Yields to other tasks after each slice of folded events, by their number and bytes."""

    def __init__(self) -> None:
        self._weight = 0.0

    async def after(self, entry: EventEntry) -> None:
        """Count an event; yield to the event loop at the end of a slice."""
        self._weight += 1 + len(entry.record) / BYTES_PER_WEIGHT
        if self._weight >= FOLD_SLICE:
            self._weight = 0.0
            await asyncio.sleep(0)
