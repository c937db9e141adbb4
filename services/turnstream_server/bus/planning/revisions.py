"""Revisions of a run's config as its planner sees them: read, and put in force by an event."""

from __future__ import annotations

from typing import Any

import redis.asyncio

from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.run.revisions import Revisions, parse_revisions
from turnstream.types import ConfigRevised
from turnstream_server.bus.leadership.leadership import LeaderScript, Term

_ANNOUNCE = LeaderScript(
    "announce_revision", "planning", "frontier config events wake groups deadlines clock"
)


async def read_revisions_async(client: redis.asyncio.Redis, run: str) -> Revisions:
    """All configs of a run.

    Raises:
        RecordError: one of them is damaged, or of a newer release.
    """
    with translating():
        fields: Any = await client.execute_command("HGETALL", keys.run_keys(run).config)
    return parse_revisions(run, fields)


async def announce_revision(term: Term, revised: ConfigRevised) -> bool:
    """Put a revision in force, and write its event after those before.

    Returns:
        False if it was in force before.

    Raises:
        ConflictError: no such revision, or the step before its first is not planned.
    """
    return bool(await _ANNOUNCE.run(term, revised.revision, encode_event(revised)))
