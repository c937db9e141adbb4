"""The end of a closed run: orphaned groups are decided, then the run is finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import redis.asyncio

from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.types import DeadlineFired, RunFinished
from turnstream_server.bus.leadership.leadership import LeaderScript, Term

_FINISH = LeaderScript("finish_run", "planning", "frontier events wake")
_END_ORPHANED = LeaderScript(
    "end_orphaned", "planning", "frontier groups members ledger events deadlines"
)


async def finish_run(term: Term, *, step: int, position: str) -> bool:
    """Finish a run after its last step; return False if it is not closed.

    It also returns False if there are events after `position`.
    """
    return bool(await _FINISH.run(term, position, encode_event(RunFinished(step=step))))


async def is_evaluating(client: redis.asyncio.Redis, run: str) -> bool:
    """Return whether an evaluation of the run has not ended."""
    with translating():
        groups: Any = await client.execute_command("HVALS", keys.run_keys(run).groups)
    return any(state.endswith(b":evaluating") for state in groups)


async def find_orphaned(term: Term, group_ids: Sequence[str]) -> dict[str, int]:
    """Return the groups without a writer, with the refills that were granted to each."""
    replies = await _end(term, [(each, "", b"") for each in group_ids])
    found = zip(group_ids, replies, strict=True)
    return {group_id: refills for group_id, refills in found if refills >= 0}


async def end_orphaned(term: Term, unheld: Mapping[str, int]) -> int:
    """Fire the deadlines of groups that no generator holds; return their number."""
    items = [
        (each, refills, encode_event(DeadlineFired(group_id=each, num_refills=refills)))
        for each, refills in unheld.items()
    ]
    return (await _end(term, items)).count(-2)


async def _end(term: Term, items: Sequence[tuple[str, int | str, bytes]]) -> list[int]:
    if not items:
        return []
    words = [
        word
        for group_id, refills, record in items
        for word in (keys.encode_name(group_id), refills, record)
    ]
    replies: list[int] = await _END_ORPHANED.run(term, *words)
    return replies
