"""Tasks of asyncio that are ended for certain, and closing that comes to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

Result = TypeVar("Result")

_ASK_AGAIN_S = 0.05


async def cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks that wait for I/O only, and wait until they have ended.

    Cancellation is repeated: below Python 3.12 `asyncio.wait_for`, which the Redis client uses, can
    lose one. A cancellation of the caller takes effect after the tasks have ended.
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


async def to_the_end(closing: Coroutine[Any, Any, Result]) -> Result:
    """Close something completely, even if the caller is cancelled, which takes effect afterwards.

    A Redis client that is cancelled while it closes keeps connections open.
    """
    task = asyncio.create_task(closing)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # looked at, or it would be reported as forgotten
    raise cancelled
