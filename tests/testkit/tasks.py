"""Tasks of a run, opened by their scripts alone."""

from __future__ import annotations

import redis
import redis.asyncio

from turnstream.store.client.scripts import run_command, run_command_async
from turnstream.store.run.tasks import (
    NoTask,
    OfferedTask,
    TakenTask,
    next_task_command,
    parse_task,
)


def next_task(client: redis.Redis, run: str, *, writer: str, request: str) -> TakenTask | NoTask:
    """Open the next task; a repeated request returns the same task."""
    found = parse_task(run_command(client, next_task_command(run, writer=writer, request=request)))
    while isinstance(found, OfferedTask):
        command = next_task_command(run, writer=writer, request=request, offered=found)
        found = parse_task(run_command(client, command))
    return found


async def next_task_async(
    client: redis.asyncio.Redis, run: str, *, writer: str, request: str
) -> TakenTask | NoTask:
    """Open the next task like `next_task`, for asyncio."""
    command = next_task_command(run, writer=writer, request=request)
    found = parse_task(await run_command_async(client, command))
    while isinstance(found, OfferedTask):
        command = next_task_command(run, writer=writer, request=request, offered=found)
        found = parse_task(await run_command_async(client, command))
    return found
