"""Decisions of a leader, written to the ledger: rejected events, ends with reasons, and refills.

An event that cannot be read or folded is rejected, and the run continues without it. A rejection is
decided once, in the store. Each later leader of the run, of any release, reads the
decisions before it folds the events, and passes over the same ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final, NamedTuple

from redis.exceptions import RedisError

from turnstream.batching.fold.decisions import Decision, MemberDropped, RefillWanted
from turnstream.errors import (
    BatchingError,
    ConflictError,
    CorruptRecordError,
    RecordError,
    TurnstreamError,
    UnknownFormatError,
)
from turnstream.records.events import check_key, decode_event
from turnstream.store.client import keys
from turnstream.types import Event, RewardPosted, SealedTrajectory, TrajectoryDied, TrajectoryKey
from turnstream_server.batcher.assembly.payload import Damage
from turnstream_server.failpoints import failpoint
from turnstream_server.ledger.core.scan import EventEntry
from turnstream_server.ledger.leadership.writes import Term
from turnstream_server.ledger.planning import trajectories
from turnstream_server.ledger.planning.groups import Settlement, grant_refill, settle_groups
from turnstream_server.ledger.planning.trajectories import Rejection
from turnstream_server.ledger.release.release import compact_groups

logger = logging.getLogger(__name__)

MAX_REASON: Final = 500
"""Longest reason, in characters: it may quote a text of a generator."""


class FoldBrokenError(Exception):
    """The fold failed inside an event; the event is rejected, and the fold restarts."""


class UnreadableEvent(NamedTuple):
    """An event that cannot be read, or that belongs to another trajectory, and the one it ends."""

    reason: str
    key: TrajectoryKey | None


def read_entry(entry: EventEntry) -> Event | UnreadableEvent:
    """Return the event of an entry, or why it cannot be read.

    An entry with field t must be a seal, or a reward, of the trajectory that the field names. A
    seal that names another trajectory, or cannot be read, ends the one in field t.

    Raises:
        UnknownFormatError: a newer release wrote the event, which this one must not pass over.
    """
    try:
        if entry.problem:
            raise CorruptRecordError(entry.problem)
        event = decode_event(entry.record)
    except UnknownFormatError as error:
        key = _posted_for(entry)
        if key is None or not error.unknown:
            raise
        return UnreadableEvent(str(error), key)
    except RecordError as error:
        return UnreadableEvent(str(error), _posted_for(entry))
    is_of_generator = isinstance(event, SealedTrajectory | RewardPosted)
    if not entry.posted_for or (
        is_of_generator and keys.trajectory_id(event.key) == entry.posted_for
    ):
        return event
    key = _posted_for(entry)
    if key is None:
        return UnreadableEvent(
            f"its field t is {entry.posted_for!r}, which names no trajectory", _named_by(event)
        )
    posted = f"a {type(event).__name__}"
    if isinstance(event, SealedTrajectory):
        posted = f"the seal of {event.key}"
    return UnreadableEvent(f"what was posted for it is {posted}", key)


class DecisionWriter:
    """Reads events, and writes decisions on them, for one term of a run's leader."""

    def __init__(self, term: Term) -> None:
        self._term = term
        self._rejected: set[str] = set()
        self._noted: list[Rejection] = []

    async def load(self) -> None:
        """Read the earlier rejections; to be called before any event is folded."""
        self._rejected = await trajectories.read_rejected(self._term.client, self._term.run)

    def read(self, entry: EventEntry) -> Event | None:
        """Return the event; None where it is rejected, now or by an earlier leader."""
        if entry.event_id in self._rejected:
            return None
        try:
            found = read_entry(entry)
        except UnknownFormatError as error:
            name = f"event {entry.event_id}"
            raise UnknownFormatError(name, error.version, error.supported, error.unknown) from error
        if not isinstance(found, UnreadableEvent):
            return found
        self._reject(entry.event_id, found.reason, key=found.key)
        return None

    def reject_unfoldable(self, event_id: str, event: Event, error: Exception) -> None:
        """Reject an event for which the fold raised an error.

        Raises:
            FoldBrokenError: the fold may hold a part of the event.
            Exception: the error itself, if the event did not cause it.
        """
        is_refusal = isinstance(error, BatchingError | RecordError)  # raised before any change
        is_of_resources = isinstance(error, MemoryError | OSError | RedisError | TurnstreamError)
        if event_id in self._rejected or (is_of_resources and not is_refusal):
            raise error
        reason = f"it cannot be folded: {str(error) or repr(error)}"
        self._reject(event_id, reason, key=_named_by(event))
        if not is_refusal:
            raise FoldBrokenError(f"event {event_id}: {reason}") from error

    async def write(self) -> None:
        """Write the noted decisions; repeats change nothing."""
        if not self._noted:
            return
        logger.error(
            "run %s: %d events are rejected, the last of them %s: %s",
            self._term.run,
            len(self._noted),
            self._noted[-1].event_id,
            self._noted[-1].reason,
        )
        failpoint("reject.before")
        await trajectories.reject_events(self._term, self._noted)
        failpoint("reject.after")
        self._noted.clear()

    async def carry_out(self, decisions: Iterable[Decision]) -> None:
        """Write decisions; those that another leader has written already change nothing."""
        known = [*decisions]
        await self._settle([each for each in known if not isinstance(each, RefillWanted)])
        for each in known:
            if isinstance(each, RefillWanted):
                await self._grant(each)

    async def without_settled(self, decisions: list[Decision]) -> list[Decision]:
        """Return the decisions whose group is still in the ledger, or whose member may be.

        A member that was sealed when its group was decided, or later, outlasts a released group.
        """
        groups = [keys.encode_name(_group_of(each)) for each in decisions]
        names = list(dict.fromkeys(groups))
        gone = await compact_groups(self._term.client, self._term.run, names)
        return [
            each
            for each, group in zip(decisions, groups, strict=True)
            if isinstance(each, MemberDropped) or group not in gone
        ]

    async def _settle(self, settled: list[Settlement]) -> None:
        await self.write()
        if not settled:
            return
        failpoint("settle.before")
        try:
            await settle_groups(self._term, settled)
        except ConflictError as error:  # the rest of them was settled
            logger.warning("a group of run %s cannot be settled: %s", self._term.run, error)
        failpoint("settle.after")

    async def _grant(self, wanted: RefillWanted) -> None:
        failpoint("grant_refill.before")
        is_new = await grant_refill(self._term, wanted)
        failpoint("grant_refill.after")
        if is_new:
            logger.info("refill %d of group %s: %s", wanted.number, wanted.key.group_id, wanted.key)

    async def mark_dead(self, damages: Iterable[Damage]) -> None:
        """Mark sealed trajectories as dead, with the reason."""
        for key, reason in damages:
            died = TrajectoryDied(key=key, reason=reason)
            failpoint("mark_dead.before")
            await trajectories.mark_dead(self._term, died)
            failpoint("mark_dead.after")

    def _reject(self, event_id: str, reason: str, *, key: TrajectoryKey | None) -> None:
        self._rejected.add(event_id)
        self._noted.append(Rejection(event_id, reason[:MAX_REASON], key))


def _posted_for(entry: EventEntry) -> TrajectoryKey | None:
    """Return the trajectory of the field t; None where it is missing or no id of a trajectory."""
    try:
        key = keys.parse_trajectory_id(entry.posted_for)
        check_key(key)
        return key if keys.trajectory_id(key) == entry.posted_for else None
    except ValueError:
        return None


def _named_by(event: Event) -> TrajectoryKey | None:
    return getattr(event, "key", None)


def _group_of(decision: Decision) -> str:
    if isinstance(decision, MemberDropped | RefillWanted):
        return decision.key.group_id
    return decision.group_id
