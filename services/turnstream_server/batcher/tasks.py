"""Tasks of asyncio: grouped, and raced."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from turnstream.store.ending import cancel_all

Result = TypeVar("Result")


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
