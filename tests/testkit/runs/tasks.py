"""Tasks of a run, opened by their scripts alone."""

from __future__ import annotations

import redis

from turnstream.generator.requests import open_task
from turnstream.store.client.scripts import run_command
from turnstream.store.run.tasks import (
    NoTask,
    TakenTask,
    next_task_command,
    parse_offer,
    parse_task,
)


def next_task(client: redis.Redis, run: str, *, writer: str) -> TakenTask | NoTask:
    offer = parse_offer(run_command(client, next_task_command(run)))
    if isinstance(offer, NoTask):
        return offer
    return parse_task(offer, run_command(client, open_task(run, offer, writer=writer).command))
