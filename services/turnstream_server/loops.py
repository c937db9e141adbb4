"""Loops that continue after errors, and tasks that end with their block."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from turnstream.errors import TurnstreamError
from turnstream.store.client.backoff import pause_after
from turnstream.store.client.cancellation import cancel_all

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


async def first_result(*works: Coroutine[Any, Any, Result]) -> Result:
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

    `what` is the sentence of the log that names the failure.
    """
    failures = _Failures(what)
    while True:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - a defect in one call must not stop the loop
            await asyncio.sleep(failures.pause_s(error))
        else:
            failures.clear()


def stop_signals() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set from now on."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


def repeat_until(stop: threading.Event, work: Callable[[], object], *, what: str) -> None:
    """Call `work` again and again in this thread until `stop` is set; see `repeat`."""
    failures = _Failures(what)
    while not stop.is_set():
        try:
            work()
        except Exception as error:  # noqa: BLE001 - a defect in one call must not stop the loop
            stop.wait(failures.pause_s(error))
        else:
            failures.clear()


class _Failures:
    """The failures of a loop in a row; the log has each known error once."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.clear()

    def clear(self) -> None:
        """Reset the count after a success."""
        self._number, self._trouble = 0, ""

    def pause_s(self, error: Exception) -> float:
        """Log a failure, and return the seconds before the next attempt."""
        if not isinstance(error, TurnstreamError):
            logger.error("%s", self._what, exc_info=error)
        elif str(error) != self._trouble:
            logger.warning("%s: %s", self._what, error)
            self._trouble = str(error)
        self._number += 1
        return pause_after(self._number)
