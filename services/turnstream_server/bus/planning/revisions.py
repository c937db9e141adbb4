"""Revisions of a run's config as its planner sees them: read, and put in force by an event."""

from __future__ import annotations

from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translate
from turnstream.store.client.scripts import Script, run_command_async
from turnstream.store.run.revisions import Revisions, parse_revisions
from turnstream.types import ConfigRevised
from turnstream_server.bus.leadership.leadership import Term

_ANNOUNCE = Script("announce_revision", "turnstream_server.bus.planning")


async def read_revisions_async(client: redis.asyncio.Redis, run: str) -> Revisions:
    """All configs of a run.

    Raises:
        RecordError: one of them is damaged, or of a newer release.
    """
    try:
        fields: Any = await client.execute_command("HGETALL", keys.run_keys(run).config)
    except (RedisError, OSError) as error:
        raise translate(error) from error
    return parse_revisions(run, fields)


async def announce_revision(term: Term, revised: ConfigRevised) -> bool:
    """Put a revision in force, and write its event after those before.

    Returns:
        False if it was in force before.

    Raises:
        ConflictError: no such revision, or the step before its first is not planned.
    """
    names = keys.run_keys(term.run)
    command = _ANNOUNCE(
        (
            *(names.leader, names.frontier, names.config, names.events),
            *(names.wake, names.groups, names.deadlines, names.clock),
        ),
        term.epoch,
        revised.revision,
        encode_event(revised),
    )
    return bool(await run_command_async(term.client, command))
