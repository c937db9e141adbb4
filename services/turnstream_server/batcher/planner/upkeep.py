"""How a leader keeps a run small: when it takes snapshots, and when it folds the ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from turnstream_server.bus.release.ledger_files import LedgerFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Upkeep:
    """Settings of the upkeep of a run.

    Attributes:
        snapshot_events: events after which a snapshot is taken, and the events are deleted.
        snapshot_steps: plans after which a snapshot is taken; until then each plan is kept.
        fold_ended: untrained trajectories of one compact record. Fewer are not worth its 100 bytes,
            and stay in the ledger.
        archive: writes a step of a run to the archive, in a thread, before the step is released;
            None for no archive.
        ledger_folder: folder for compact records of old batches; None keeps them in the store.
    """

    snapshot_events: int = 10_000
    snapshot_steps: int = 64
    fold_ended: int = 250
    archive: Callable[[str, int], object] | None = None
    ledger_folder: LedgerFolder | None = None


DEFAULT_UPKEEP: Final = Upkeep()
