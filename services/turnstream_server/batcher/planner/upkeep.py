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
        snapshot_events: a snapshot is taken after so many events, and the events go.
        snapshot_steps: or after so many plans, since the plan of a step is kept until then.
        fold_ended: so many trajectories that ended untrained make a compact record. Fewer are
            not worth its 100 bytes, and stay in the ledger one by one.
        archive: what keeps a committed step before it may be released; None keeps none.
        ledger_folder: where compact records of old batches go; None keeps them in the store.
        before: awaited before every act.
    """

    snapshot_events: int = 10_000
    snapshot_steps: int = 64
    fold_ended: int = 250
    archive: Archive | None = None
    ledger_folder: LedgerFolder | None = None
    before: Failpoint = no_failpoint


DEFAULT_UPKEEP: Final = Upkeep()
