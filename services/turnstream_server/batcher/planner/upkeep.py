"""How a leader keeps a run small: when it takes snapshots, and when it folds the ledger."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from turnstream_server.bus.release.ledger_files import LedgerFolder

Archive = Callable[[str, int], object]
"""Writes a step of a run to the archive, in a thread; returns when it is on disk."""

Failpoint = Callable[[str], Awaitable[None]]
"""Awaited before an act on the store, with its name; for fault injection."""


async def no_failpoint(_: str) -> None:
    """Do nothing before an act."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upkeep:
    """Settings of the upkeep of a run.

    Attributes:
        snapshot_events: events after which a snapshot is taken, and the events are deleted.
        snapshot_steps: plans after which a snapshot is taken; until then each plan is kept.
        fold_ended: untrained trajectories of one compact record. Fewer are not worth its 100 bytes,
            and stay in the ledger.
        archive: archives a committed step before its release; None for no archive.
        ledger_folder: folder for compact records of old batches; None keeps them in the store.
        before: awaited before every act.
    """

    snapshot_events: int = 10_000
    snapshot_steps: int = 64
    fold_ended: int = 250
    archive: Archive | None = None
    ledger_folder: LedgerFolder | None = None
    before: Failpoint = no_failpoint


DEFAULT_UPKEEP: Final = Upkeep()
