"""Events that a leader writes: a batch is due, a config is in force, the run is finished."""

from __future__ import annotations

from typing import Any

import redis.asyncio

from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.run.configs import Revisions, parse_revisions
from turnstream.types import BatchDue, ConfigRevised, RunFinished
from turnstream_server.bus.leadership.leadership import LeaderScript, Term

_DUE = LeaderScript("batch_due", "planning", "events")
_ANNOUNCE = LeaderScript(
    "announce_revision", "planning", "frontier config events wake groups deadlines clock"
)
_FINISH = LeaderScript("finish_run", "planning", "frontier events wake")


async def announce_due(term: Term, due: BatchDue) -> str:
    """Write the event at which the groups of a batch are chosen, once; return its id."""
    event_id: bytes = await _DUE.run(term, encode_event(due))
    return event_id.decode()


async def read_revisions_async(client: redis.asyncio.Redis, run: str) -> Revisions:
    """Return all configs of a run."""
    with translating():
        fields: Any = await client.execute_command("HGETALL", keys.run_keys(run).config)
    return parse_revisions(run, fields)


async def announce_revision(term: Term, revised: ConfigRevised) -> bool:
    """Put a revision in force, and write its event; return False if it was in force before.

    Raises:
        ConflictError: no such revision, or the step before its first is not planned.
    """
    return bool(await _ANNOUNCE.run(term, revised.revision, encode_event(revised)))


async def finish_run(term: Term, *, step: int, position: str) -> bool:
    """Finish a run after its last step, if it is closed and has no events after `position`."""
    return bool(await _FINISH.run(term, position, encode_event(RunFinished(step=step))))
