"""A summary of a job, for tests of what is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from testkit import sealed
from turnstream_server.console.summary import Summary, summarise


def make_summary(*rewards: float, ledger: Mapping[str, int] | None = None, **given: Any) -> Summary:
    """Return a summary with a sealed trajectory for each reward."""
    defaults = {
        "num_groups": 1,
        "sealed": [sealed(reward=reward) for reward in rewards],
        "batches": [],
        "planned": 7,
        "stepped": 7,
        "elapsed_s": 1.0,
    }
    return summarise(ledger=ledger or {}, **{**defaults, **given})
