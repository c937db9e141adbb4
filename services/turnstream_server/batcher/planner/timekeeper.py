"""The only source of time events: jobs that run while this replica leads a run.

Leases use the store's clock, which all replicas share. After a jump of that clock, or a pause of
the store, leases have expired that no writer could renew. So the timekeeper compares the clock with
its own, and jobs about leases wait until it has been steady. Deadlines and observers use the run's
time.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, NamedTuple

import redis.asyncio

from turnstream.batching.config import BatchingConfig
from turnstream.store.client.replies import translating
from turnstream_server.batcher.planner.leader import Leader
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.ledger.leadership.leader_fields import LONGEST_MOST_S, RunClock
from turnstream_server.ledger.leadership.writes import Term, time_ms
from turnstream_server.ledger.planning.deadlines import (
    abandon_lapsed,
    end_orphaned,
    find_orphaned,
    fire_deadlines,
)
from turnstream_server.ledger.sessions.observers import forget_observers

logger = logging.getLogger(__name__)

READS_PER_LEASE: Final = 10
"""How often the store's clock is read."""

TOLERANCE_LEASES: Final = 1 / 4
"""Tolerated pause of the store, and jump of its clock, in leases. A writer that renews every third
of its lease survives both together. Longer ones make the clock unsteady."""

STEADY_LEASES: Final = 1 / 2
"""How long the clock must have been steady before a lease counts as expired: in this time the store
receives a heartbeat from every living writer."""

CHECKS_PER_DEADLINE: Final = 20
"""A deadline that is set while the timekeeper sleeps fires late by so small a part of it."""

LONGEST_PAUSE_S: Final = 5.0
"""Pause between two checks of the run's clock, of the observers, and of the deadlines, which
generators of any release may set."""

MAX_ORPHANED: Final = 200
"""Orphaned groups decided at a time; the others follow."""


class ClockReading(NamedTuple):
    """A reading of the store's clock, at the local time `own_s`.

    The store has answered for `steady_s` without a gap, with its clock in pace with ours.
    """

    server_ms: int
    steady_s: float
    own_s: float


class SteadyClock:
    """Compares the store's clock with our own; silence and jumps up to the tolerance are none."""

    def __init__(self, *, tolerance_s: float) -> None:
        self._tolerance_s = tolerance_s
        self._since_s = 0.0
        self._read_s = float("-inf")
        self._ahead_s = 0.0

    def read(self, *, server_ms: int, now_s: float) -> ClockReading:
        """Return the reading of a time that the store has just reported."""
        ahead_s = server_ms / 1000 - now_s
        was_silent = now_s - self._read_s > self._tolerance_s
        if was_silent or abs(ahead_s - self._ahead_s) > self._tolerance_s:
            self._since_s, self._ahead_s = now_s, ahead_s
        self._read_s = now_s
        return ClockReading(server_ms, now_s - self._since_s, now_s)


class Timekeeper:
    """Does what is due in one run, for one term of its leader, with one config.

    Each job is fenced by the epoch of the term, and returns the seconds after which it must run
    again.
    """

    def __init__(self, term: Term, view: RunView, leader: Leader, config: BatchingConfig) -> None:
        self._term = term
        self._view = view
        self._leader = leader
        self._config = config
        self._tolerance_s = config.lease_s * TOLERANCE_LEASES
        self._read_every_s = config.lease_s / READS_PER_LEASE
        self._clock = RunClock(term, most_s=min(LONGEST_MOST_S, self._tolerance_s))
        self._orphaned_since_s: dict[str, float] = {}

    async def run(self, *, revision: int) -> None:
        """Run each job when it is due, until a later revision of the config is in force."""
        loop = asyncio.get_running_loop()
        clock = SteadyClock(tolerance_s=self._tolerance_s)
        jobs = (
            self.tick,  # before all jobs that use the run's time
            self.abandon_lapsed,
            self.fire_deadlines,
            self.remove_observers,
            self.end_orphaned,
        )
        due_s = [0.0] * len(jobs)
        while self._leader.config_revision <= revision:
            if min(due_s) <= loop.time():  # not after a change of the run alone
                server_ms = await _read_clock(self._term.client)
                reading = clock.read(server_ms=server_ms, now_s=loop.time())
                for index, job in enumerate(jobs):
                    if due_s[index] <= loop.time():
                        due_s[index] = await job(reading) + loop.time()
            await self._view.wait_for_change(min(min(due_s) - loop.time(), self._read_every_s))

    async def tick(self, reading: ClockReading) -> float:
        """Count the run's time."""
        await self._clock.tick(server_ms=reading.server_ms, own_s=reading.own_s)
        return min(LONGEST_PAUSE_S, self._read_every_s)

    async def abandon_lapsed(self, reading: ClockReading) -> float:
        """Abandon trajectories that were not adopted within `takeover_s`."""
        if not self._is_steady(reading):
            return self._read_every_s
        until_ms = reading.server_ms - round(self._config.takeover_s * 1000)
        has_more = await abandon_lapsed(self._term, until_ms=until_ms)
        return 0.0 if has_more else self._read_every_s

    async def fire_deadlines(self, reading: ClockReading) -> float:
        """Write the events of groups and rewards whose deadline has passed."""
        next_ms = await fire_deadlines(self._term, run_ms=self._clock.at(reading.own_s))
        settings = (self._config.group_deadline_s, self._config.reward_deadline_s)
        pauses_s = [each_s / CHECKS_PER_DEADLINE for each_s in settings if each_s > 0]
        return min([LONGEST_PAUSE_S, *pauses_s, *([next_ms / 1000] if next_ms >= 0 else [])])

    async def remove_observers(self, reading: ClockReading) -> float:
        """Remove observers that were silent for longer than their expiry."""
        next_ms = await forget_observers(self._term, run_ms=self._clock.at(reading.own_s))
        return LONGEST_PAUSE_S if next_ms < 0 else min(LONGEST_PAUSE_S, next_ms / 1000)

    async def end_orphaned(self, reading: ClockReading) -> float:
        """Fire the deadline of orphaned groups of a closed run, so that the run ends.

        A dead generator leaves samples that it had opened, which expire with their leases, and
        samples that it had not. In an open run another generator may open these; in a closed one
        none can. Orphaned groups have had no writer for `lease_s + takeover_s`.
        """
        since_s = self._orphaned_since_s
        if not (self._view.frontier.is_closed and self._is_steady(reading)):
            since_s.clear()
            return self._read_every_s
        now_s = asyncio.get_running_loop().time()
        found = await find_orphaned(self._term, self._leader.undecided()[:MAX_ORPHANED])
        self._orphaned_since_s = {each: since_s.get(each, now_s) for each in found}
        oldest_s = now_s - self._config.lease_s - self._config.takeover_s
        due = [found[each] for each in found if self._orphaned_since_s[each] <= oldest_s]
        num_fired = await end_orphaned(self._term, due)
        if num_fired:
            logger.warning("run %s is closed: %d groups have no writer", self._term.run, num_fired)
        return self._read_every_s

    def _is_steady(self, reading: ClockReading) -> bool:
        return reading.steady_s >= self._config.lease_s * STEADY_LEASES


async def _read_clock(client: redis.asyncio.Redis) -> int:
    with translating():
        time: Any = await client.execute_command("TIME")
    return time_ms(time)
