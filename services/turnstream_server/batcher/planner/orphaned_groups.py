"""Orphaned groups of a closed run, which are decided so that the run ends.

A dead generator leaves samples that it had opened, which expire with their leases, and samples that
it had not. In an open run another generator may open these; in a closed one none can.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from turnstream.batching.config import BatchingConfig
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.batcher.planner.timekeeper import (
    READS_PER_LEASE,
    STEADY_LEASES,
    ClockReading,
    Job,
)
from turnstream_server.bus.leadership.leadership import Term
from turnstream_server.bus.planning.run_completion import end_orphaned, find_orphaned

logger = logging.getLogger(__name__)

MAX_GROUPS: Final = 200
"""Groups decided at a time; the others follow."""


def orphaned_groups(term: Term, view: RunView, config: BatchingConfig) -> Job:
    """Return the job that fires the deadline of groups without a writer.

    They have had none for `lease_s + takeover_s`.
    """
    wait_s = config.lease_s + config.takeover_s
    pause_s = config.lease_s / READS_PER_LEASE
    since_s: dict[str, float] = {}

    async def decide(reading: ClockReading) -> float:
        is_steady = reading.steady_s >= config.lease_s * STEADY_LEASES
        if not (view.frontier.is_closed and is_steady):
            since_s.clear()
            return pause_s
        now_s = asyncio.get_running_loop().time()
        found = await find_orphaned(term, view.undecided()[:MAX_GROUPS])
        for group_id in since_s.keys() - found.keys():
            del since_s[group_id]
        for group_id in found:
            since_s.setdefault(group_id, now_s)
        due = {each: found[each] for each in found if now_s - since_s[each] >= wait_s}
        num_fired = await end_orphaned(term, due)
        if num_fired:
            logger.warning("run %s is closed: %d groups have no writer", term.run, num_fired)
        return pause_s

    return decide
