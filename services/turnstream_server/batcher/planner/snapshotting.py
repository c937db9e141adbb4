"""Snapshots of a leader's state for its successor, which shorten the history of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from turnstream.batching.fold.readiness import RunFold
from turnstream.batching.planning.plan_batch import event_order
from turnstream.records.snapshots import PlannerSnapshot, encode_snapshot
from turnstream.store.client import keys
from turnstream_server.batcher.assembly.assembler import Assembler
from turnstream_server.failpoints import failpoint
from turnstream_server.ledger.leadership.leader_fields import (
    last_event_id,
    read_snapshot,
    save_snapshot,
    trim_events,
)
from turnstream_server.ledger.leadership.writes import Term
from turnstream_server.ledger.release.release import compact_groups

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Upkeep:
    """Settings of the upkeep of a run.

    Attributes:
        snapshot_events: events after which a snapshot is taken, and the events are deleted.
        snapshot_steps: plans after which a snapshot is taken; until then each plan is kept.
        compact_ended: untrained trajectories of one compact record. Fewer are not worth 100 bytes,
            and stay in the ledger.
        archive: writes a step of a run to the archive, in a thread, before the step is released;
            None for no archive.
    """

    snapshot_events: int = 10_000
    snapshot_steps: int = 64
    compact_ended: int = 250
    archive: Callable[[str, int], object] | None = None


MAX_SNAPSHOT_BYTES: Final = 24 << 20
"""Bytes of a snapshot, at most: about 30 ms of the store, and 500,000 trajectories."""

DEFAULT_UPKEEP: Final = Upkeep()


class PlannerSnapshots:
    """Snapshots of one leader's term, encoded in the threads of the assembler."""

    def __init__(self, term: Term, assembler: Assembler, *, upkeep: Upkeep) -> None:
        self._num_events = 0
        self._term = term
        self._assembler = assembler
        self._upkeep = upkeep
        self._step = 0
        self._released_groups: tuple[str, ...] = ()
        self._released_at = "0-0"

    async def read(self) -> PlannerSnapshot | None:
        """Return the newest snapshot; None before the first."""
        snapshot = await read_snapshot(self._term.client, self._term.run)
        if snapshot is not None:
            self._step = snapshot.step
        return snapshot

    def is_due(self, *, step: int) -> bool:
        """Return whether a snapshot is due; `step` is the newest plan."""
        return (
            self._num_events >= self._upkeep.snapshot_events
            or step - self._step >= self._upkeep.snapshot_steps
        )

    async def save(self, snapshot: PlannerSnapshot, fold: RunFold) -> None:
        """Store a snapshot of the fold, which must not change in this call; trim the history."""
        record = await self._assembler.in_thread(lambda: encode_snapshot(snapshot))
        if len(record) > MAX_SNAPSHOT_BYTES:
            self._num_events, self._step = 0, snapshot.step
            logger.warning(
                "run %s: a snapshot of %d bytes, more than %d, is not stored: its events are kept "
                "until fewer trajectories wait to be planned",
                self._term.run,
                len(record),
                MAX_SNAPSHOT_BYTES,
            )
            return
        failpoint("save_snapshot.before")
        await save_snapshot(
            self._term, position=snapshot.position, step=snapshot.step, record=record
        )
        self._num_events, self._step = 0, snapshot.step
        failpoint("trim_events.before")
        while await trim_events(self._term):
            pass
        await self._find_released_groups(fold)
        self.forget_groups(fold, position=snapshot.position)

    def count_events(self, number: int) -> None:
        """Count events that were folded."""
        self._num_events += number

    def forget_groups(self, fold: RunFold, *, position: str) -> None:
        """Drop released groups from a fold that has folded the events up to `position`."""
        if self._released_groups and event_order(position) >= event_order(self._released_at):
            fold.remove_decided(self._released_groups)
            self._released_groups = ()

    async def _find_released_groups(self, fold: RunFold) -> None:
        """Find the decided groups of which no seal will be posted; the fold keeps the others."""
        names = {keys.encode_name(group_id): group_id for group_id in fold.state.decided}
        gone = await compact_groups(self._term.client, self._term.run, list(names))
        self._released_at = await last_event_id(self._term.client, self._term.run)
        self._released_groups = tuple(names[name] for name in gone)
