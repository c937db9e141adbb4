"""Tasks of a run, opened by their scripts alone."""

from __future__ import annotations

import redis
import redis.asyncio

from turnstream.store.client.scripts import run_command, run_command_async
from turnstream.store.run.tasks import (
    NoTask,
    TakenTask,
    next_task_command,
    open_task_command,
    parse_offer,
    parse_task,
)


def next_task(client: redis.Redis, run: str, *, writer: str) -> TakenTask | NoTask:
    offer = parse_offer(run_command(client, next_task_command(run)))
    if isinstance(offer, NoTask):
        return offer
    return parse_task(offer, run_command(client, open_task_command(run, offer, writer=writer)))


async def next_task_async(
    client: redis.asyncio.Redis, run: str, *, writer: str
) -> TakenTask | NoTask:
    """Open the next task like `next_task`, for asyncio."""
    offer = parse_offer(await run_command_async(client, next_task_command(run)))
    if isinstance(offer, NoTask):
        return offer
    command = open_task_command(run, offer, writer=writer)
    return parse_task(offer, await run_command_async(client, command))
