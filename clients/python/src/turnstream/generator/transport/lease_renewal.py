"""Renews the leases of a publisher while a round of its writes takes long."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Final

from redis.exceptions import RedisError

from turnstream.generator.outbox.outbox import Outbox
from turnstream.generator.transport.transport import Link
from turnstream.store.client.cancellation import cancel_all, to_the_end

LEAST_PAUSE_S: Final = 0.1
"""A third of the shortest lease."""


@contextlib.asynccontextmanager
async def renewing(
    outbox: Outbox,
    lock: threading.Lock,
    *,
    connect: Callable[[], Link],
    now: Callable[[], float],
) -> AsyncGenerator[None]:
    """Send heartbeats that get due within the block over a connection of their own.

    The block sends a round, after which nothing else fits on its connection: over a slow link, a
    large turn takes longer than a lease lasts.

    Args:
        outbox: its writes, of which one round is in flight.
        lock: held during every use of the outbox.
        connect: makes the connection.
        now: returns the time of the outbox.
    """
    task: asyncio.Task[None] | None = None

    def begin() -> None:
        nonlocal task
        beats = _renew(outbox, lock, connect=connect, now=now)
        task = asyncio.create_task(beats, name="turnstream-heartbeats")

    with lock:
        due_s = outbox.tracker.heartbeats.pause_s(now())
    if due_s is None:  # nothing is open
        yield
        return
    timer = asyncio.get_running_loop().call_later(max(due_s, LEAST_PAUSE_S), begin)
    try:
        yield
    finally:
        timer.cancel()
        if task is not None:
            await cancel_all([task])


async def _renew(
    outbox: Outbox,
    lock: threading.Lock,
    *,
    connect: Callable[[], Link],
    now: Callable[[], float],
) -> None:
    """Send heartbeats whenever they are due, while a trajectory is open."""
    link = connect()
    try:
        while True:
            with lock:
                sent_s = now()
                sent = outbox.next_beats(sent_s)
            if sent is not None:
                with contextlib.suppress(RedisError, OSError):
                    answers = await link.exchange(sent)
                    with lock:
                        outbox.beats_answered(answers, sent_s=sent_s)
            with lock:
                pause_s = outbox.tracker.heartbeats.pause_s(now())
            if pause_s is None:
                return
            await asyncio.sleep(max(pause_s, LEAST_PAUSE_S))
    finally:
        await to_the_end(link.close())
