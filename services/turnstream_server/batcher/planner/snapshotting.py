"""Snapshots of a leader's state for its successor, which shorten the history of a run."""

from __future__ import annotations

from turnstream.batching.fold.readiness import RunFold
from turnstream.records.snapshots import PlannerSnapshot, encode_snapshot
from turnstream.store.client import keys
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.batcher.planner.upkeep import Upkeep
from turnstream_server.bus.leadership.leadership import Term
from turnstream_server.bus.leadership.snapshots import (
    last_event_id,
    read_snapshot,
    save_snapshot,
    trim_events,
)
from turnstream_server.bus.release.release import groups_that_are_gone


class PlannerSnapshots:
    """Snapshots of one leader's term.

    Args:
        term: the leader's term.
        assembler: owner of the threads in which snapshots are encoded.
        upkeep: when a snapshot is due.

    Attributes:
        num_events: events folded since the last snapshot.
    """

    def __init__(self, term: Term, assembler: Assembler, *, upkeep: Upkeep) -> None:
        self.num_events = 0
        self._term = term
        self._assembler = assembler
        self._upkeep = upkeep
        self._step = 0
        self._forgettable: tuple[str, ...] = ()
        self._forget_after = "0-0"

    async def read(self) -> PlannerSnapshot | None:
        """The snapshot of the leader before, or None.

        Raises:
            RecordError: it is damaged, or of a newer release.
        """
        snapshot = await read_snapshot(self._term.client, self._term.run)
        if snapshot is not None:
            self._step = snapshot.step
        return snapshot

    def is_due(self, *, step: int) -> bool:
        """Whether enough has happened since the last snapshot; `step` is the newest plan."""
        return (
            self.num_events >= self._upkeep.snapshot_events
            or step - self._step >= self._upkeep.snapshot_steps
        )

    async def save(self, snapshot: PlannerSnapshot, fold: RunFold) -> None:
        """Store a snapshot of the fold, which must not change in this call; trim the history."""
        record = await self._assembler.in_thread(lambda: encode_snapshot(snapshot))
        await self._upkeep.before("save_snapshot")
        await save_snapshot(
            self._term, position=snapshot.position, step=snapshot.step, record=record
        )
        self.num_events, self._step = 0, snapshot.step
        await self._upkeep.before("trim_events")
        while await trim_events(self._term):
            pass
        await self._find_forgettable(fold)
        self.forget(fold, position=snapshot.position)

    def forget(self, fold: RunFold, *, position: str) -> None:
        """Let the fold forget what it may, now that it has heard the events up to `position`."""
        if self._forgettable and event_position(position) >= event_position(self._forget_after):
            fold.forget(self._forgettable)
            self._forgettable = ()

    async def _find_forgettable(self, fold: RunFold) -> None:
        """Decided groups of which the store has but a fingerprint: it posts no seal of them.

        Seals that were posted before must still find the fold as it is.
        """
        names = {keys.encode_name(group_id): group_id for group_id in fold.decided}
        gone = await groups_that_are_gone(self._term.client, self._term.run, list(names))
        self._forget_after = await last_event_id(self._term.client, self._term.run)
        self._forgettable = tuple(names[name] for name in gone)


def event_position(event_id: str) -> tuple[int, int]:
    """A stream id as numbers, which are ordered as the events are."""
    milliseconds, _, sequence = event_id.partition("-")
    return int(milliseconds), int(sequence or 0)
