"""Snapshots of a run that waits."""

from __future__ import annotations

from typing import Any

from turnstream.batching.config import BatchingConfig
from turnstream.store.client.fullness import Bytes
from turnstream.store.waits.wait_snapshot import WaitSnapshot


def snapshot(
    *, config: dict[str, Any] | None = None, budget: dict[str, int] | None = None, **fields: Any
) -> WaitSnapshot:
    """Return a run after step 2 whose trainer waits for step 3, as its generators see it.

    It may have 16 live groups, and has 10. One is ready, one is open.
    """
    settings: dict[str, Any] = {"batch_groups": 4, "mini_batch_groups": 4, "max_staleness": 1}
    with_config = BatchingConfig(**{**settings, **(config or {})})
    held = Bytes(needed=20_000, max_bytes=with_config.max_bytes)
    usual: dict[str, Any] = {
        "run": "maze",
        "config": with_config,
        "budget": held._replace(**(budget or {})),
        "stepped": 2,
        "planned": 2,
        "released": 2,
        "planned_groups": 8,
        "num_live": 10,
        "num_open": 1,
        "num_opened": 10,
        "num_ready": 1,
        "num_waiting": 1,
        "session_epoch": 1,
        "planner": "p",
        "planner_left_s": 5.0,
    }
    return WaitSnapshot(**{**usual, **fields})


def scanned(**fields: Any) -> WaitSnapshot:
    """Return the same with a scanned ledger, as `turnstream why` sees it."""
    return snapshot(is_scanned=True, **fields)
