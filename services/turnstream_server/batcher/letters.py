"""Poison on a leader's table: what nobody can read, or what lies, is set aside and named.

The run goes on. An event that stopped the planner would stop each of its successors too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

import redis.asyncio

from turnstream.errors import ConflictError, CorruptRecordError, RecordError
from turnstream.records.events import decode_event, key_of_seal
from turnstream.store import keys
from turnstream.types import Event, RewardPosted, SealedTrajectory, TrajectoryDied, TrajectoryKey
from turnstream_server.batcher.listener import EventEntry
from turnstream_server.batcher.payload import Damage
from turnstream_server.bus.trajectories import keep_event, mark_dead
from turnstream_server.failpoints import reach

logger = logging.getLogger(__name__)


class UnreadableEvent(NamedTuple):
    """An event that says nothing, and of nobody."""

    entry: EventEntry
    reason: str


def read_entry(entry: EventEntry) -> Event | Damage | UnreadableEvent:
    """The event, or what is to be set aside in its place.

    What a generator posted is a seal, or a reward, of the trajectory that it was posted for.
    Anything else there is poison of that trajectory, however well it reads: a seal that names
    another trajectory would end that one.

    Raises:
        RecordError: an event of a newer release, which this one must not pass over.
    """
    try:
        event = decode_event(entry.record)
    except RecordError as error:
        key = _posted_for(entry) or key_of_seal(entry.record)
        if key is not None:
            return Damage(key, str(error))
        if not isinstance(error, CorruptRecordError):
            raise
        return UnreadableEvent(entry, str(error))
    key = _posted_for(entry)
    if key is None or (isinstance(event, SealedTrajectory | RewardPosted) and event.key == key):
        return event
    return Damage(key, f"what was posted for it is {_described(event)}")


class LetterBox:
    """Sets poison aside, for one term of a run's leader.

    Args:
        client: of the store.
        run: name of the run.
        epoch: fencing number of the term.
    """

    def __init__(self, client: redis.asyncio.Redis, run: str, *, epoch: int) -> None:
        self._client = client
        self._run = run
        self._epoch = epoch
        self._noted: list[Damage | UnreadableEvent] = []

    def read(self, entry: EventEntry) -> Event | None:
        """The event; None where it is poison, which is noted for `put_away`.

        Raises:
            RecordError: an event of a newer release.
        """
        found = read_entry(entry)
        if not isinstance(found, Damage | UnreadableEvent):
            return found
        logger.error("event %s of run %s is poison: %s", entry.event_id, self._run, found.reason)
        self._noted.append(found)
        return None

    async def put_away(self) -> None:
        """Tell the ledger of what was noted; it may have been told before.

        Raises:
            FencedError: another planner leads the run.
            StoreUnavailableError: the store cannot be reached.
        """
        for noted in self._noted:
            if isinstance(noted, UnreadableEvent):
                await self._keep(noted)
            else:
                await self._put_away(noted)
        self._noted.clear()

    async def set_aside(self, damages: Iterable[Damage]) -> None:
        """Mark sealed trajectories as dead, with the reason.

        Raises:
            FencedError: another planner leads the run.
            ConflictError: one of them is not sealed.
            StoreUnavailableError: the store cannot be reached.
        """
        for key, reason in damages:
            died = TrajectoryDied(key=key, reason=reason)
            reach("mark_dead.before")
            await mark_dead(self._client, self._run, died, leader_epoch=self._epoch)
            reach("mark_dead.after")

    async def _put_away(self, damage: Damage) -> None:
        try:
            await self.set_aside([damage])
        except ConflictError as error:  # its end was told by something else, and stands
            logger.warning("poison of run %s is over already: %s", self._run, error)

    async def _keep(self, noted: UnreadableEvent) -> None:
        event_id, record, _ = noted.entry
        await keep_event(
            self._client,
            self._run,
            event_id=event_id,
            record=record,
            reason=noted.reason,
            leader_epoch=self._epoch,
        )


def _posted_for(entry: EventEntry) -> TrajectoryKey | None:
    return keys.parse_trajectory_id(entry.posted_for) if entry.posted_for else None


def _described(event: Event) -> str:
    if isinstance(event, SealedTrajectory):
        return f"the seal of {event.key}"
    return f"a {type(event).__name__}"
