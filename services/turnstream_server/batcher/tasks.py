"""Tasks of asyncio: grouped, raced, and ended for certain."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Final, TypeVar

Result = TypeVar("Result")

_ASK_AGAIN_S: Final = 0.05


@contextlib.asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup that raises a single error as it is, and not as a group of one."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except ExceptionGroup as group:
        error, *others = group.exceptions
        if others:
            raise
        raise error from None


async def first_of(*works: Coroutine[Any, Any, Result]) -> Result:
    """Run all until the first ends, end the others, and give what it gave, or raise what it raised.

    The works run in tasks of their own. Whoever calls the Redis client does it in such a work, also
    a single one: see `cancel_all`.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks that wait for nothing but I/O, and wait until they have ended, however.

    They are asked again and again: below Python 3.12 `asyncio.wait_for`, which the Redis client
    uses, forgets a cancellation that comes just when what it waits for is done. Whoever cancels the
    caller meanwhile is obeyed when they have ended: nothing goes on alone.
    """
    cancelled: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=_ASK_AGAIN_S)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # looked at, or it would be reported as forgotten
    if cancelled is not None:
        raise cancelled
