"""Damaged trajectories and rejected events, which become dead letters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import redis.asyncio

from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.types import TrajectoryDied, TrajectoryKey
from turnstream_server.bus.leadership.leadership import LeaderScript, Term

_MARK_DEAD = LeaderScript("mark_dead", "planning", "ledger counts events letters deadlines held")
_REJECT_EVENTS = LeaderScript(
    "reject_events", "planning", "ledger counts events letters deadlines held damaged rejected"
)
_PAGE = 1000

MAX_KEPT_BYTES: Final = 4_096
"""Bytes of a rejected event's record that are kept, at most."""

MAX_KEPT_EVENTS: Final = 1_000
"""Rejected events of a run that are kept, at most; the oldest are removed."""

_REJECT_SLICE: Final = 25
"""Rejections of one call, for which the server copies each event whole."""


class Rejection(NamedTuple):
    """An event that counts for nothing, and why.

    Attributes:
        key: key of the trajectory that the event ends, if that is sealed; None if it names no
            trajectory.
    """

    event_id: str
    reason: str
    key: TrajectoryKey | None


async def mark_dead(term: Term, died: TrajectoryDied) -> bool:
    """Mark a sealed trajectory as dead, keep its payload, and notify the planner, once.

    Returns:
        False where it was dead before.

    Raises:
        ConflictError: it is not sealed, or already in a batch.
    """
    words = (keys.trajectory_id(died.key), died.reason, encode_event(died))
    return bool(await _MARK_DEAD.run(term, *words))


async def reject_events(term: Term, rejections: Sequence[Rejection]) -> int:
    """Reject events, each once, and keep them or their trajectories as dead letters.

    Returns:
        How many were rejected now.
    """
    num_new = 0
    for start in range(0, len(rejections), _REJECT_SLICE):
        words: list[str | bytes] = []
        for each in rejections[start : start + _REJECT_SLICE]:
            words += (each.event_id, each.reason)
            if each.key is None:
                words += ("", b"")
            else:
                died = TrajectoryDied(key=each.key, reason=each.reason)
                words += (keys.trajectory_id(each.key), encode_event(died))
        num_new += await _REJECT_EVENTS.run(term, MAX_KEPT_BYTES, MAX_KEPT_EVENTS, *words)
    return num_new


async def read_rejected(client: redis.asyncio.Redis, run: str) -> set[str]:
    """Return the ids of all rejected events of a run that a leader may still read."""
    name, rejected = keys.run_keys(run).rejected, set[str]()
    for start in itertools.count(0, _PAGE):
        with translating():
            page: Any = await client.execute_command("ZRANGE", name, start, start + _PAGE - 1)
        rejected.update(event_id.decode() for event_id in page)
        if len(page) < _PAGE:
            break
    return rejected
