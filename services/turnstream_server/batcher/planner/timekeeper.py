"""The only source of time events: jobs that run while this replica leads.

Leases use the store's clock, which all replicas share. After a jump of that clock, or a pause of
the store, leases have expired that no writer could renew. So the timekeeper compares the clock with
its own, and passes each job the time for which it has been steady. Deadlines and observers use the
run's time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

import redis.asyncio

from turnstream.batching.config import BatchingConfig
from turnstream.store.client.replies import translating
from turnstream_server.bus.leadership.clock import LONGEST_MOST_S, RunClock
from turnstream_server.bus.leadership.leadership import Term
from turnstream_server.bus.planning.deadlines import fire_deadlines
from turnstream_server.bus.planning.leases import abandon_lapsed
from turnstream_server.bus.sessions.observers import forget_observers

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

Sleep = Callable[[float], Awaitable[object]]


class ClockReading(NamedTuple):
    """A reading of the store's clock.

    Attributes:
        server_ms: the reading. Scripts use it, so a jump between reading and running has no effect.
        steady_s: seconds for which the store has answered without a gap, with its clock in pace
            with ours.
        own_s: local time when the answer arrived.
    """

    server_ms: int
    steady_s: float
    own_s: float


Job = Callable[[ClockReading], Awaitable[float]]
"""Does what is due, and returns the seconds after which it must run again."""


class SteadyClock:
    """Compares the store's clock with our own monotonic one. No I/O.

    Args:
        tolerance_s: how long the store may be silent, and how far its clock may be set.
    """

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


async def keep_time(
    client: redis.asyncio.Redis,
    jobs: Sequence[Job],
    *,
    tolerance_s: float,
    longest_pause_s: float,
    until: Callable[[], bool] = lambda: False,
    sleep: Sleep = asyncio.sleep,
) -> None:
    """Run each job when it is due, in order, until `until` holds.

    Args:
        client: client of the store.
        jobs: each must be fenced by the epoch of the term.
        tolerance_s: see SteadyClock.
        longest_pause_s: longest time between two reads of the store's clock.
        until: ends the loop.
        sleep: pauses for so many seconds, or less.
    """
    loop = asyncio.get_running_loop()
    clock = SteadyClock(tolerance_s=tolerance_s)
    due_s = [0.0] * len(jobs)
    while not until():
        reading = clock.read(server_ms=await _read_clock(client), now_s=loop.time())
        for index, job in enumerate(jobs):
            if due_s[index] <= loop.time():
                due_s[index] = await job(reading) + loop.time()
        pause_s = min(due_s, default=float("inf")) - loop.time()
        await sleep(max(0.0, min(pause_s, longest_pause_s)))


async def keep_time_of_run(
    term: Term,
    config: BatchingConfig,
    *,
    others: Sequence[Job],
    until: Callable[[], bool],
    sleep: Sleep,
) -> None:
    """Run every job of a run, and others, as `keep_time` does."""
    tolerance_s = config.lease_s * TOLERANCE_LEASES
    clock = RunClock(term, most_s=min(LONGEST_MOST_S, tolerance_s))
    await keep_time(
        term.client,
        [
            ticking_clock(clock, config),
            lapsed_leases(term, config),
            passed_deadlines(term, clock, config),
            silent_observers(term, clock),
            *others,
        ],
        tolerance_s=tolerance_s,
        longest_pause_s=config.lease_s / READS_PER_LEASE,
        until=until,
        sleep=sleep,
    )


def ticking_clock(clock: RunClock, config: BatchingConfig) -> Job:
    """Return the job that counts the run's time; it comes before all jobs that use this time."""
    pause_s = min(LONGEST_PAUSE_S, config.lease_s / READS_PER_LEASE)

    async def tick(reading: ClockReading) -> float:
        await clock.tick(server_ms=reading.server_ms, own_s=reading.own_s)
        return pause_s

    return tick


def lapsed_leases(term: Term, config: BatchingConfig) -> Job:
    """Return the job that abandons trajectories not adopted in time (`takeover_s`)."""
    takeover_ms = round(config.takeover_s * 1000)
    pause_s = config.lease_s / READS_PER_LEASE

    async def abandon(reading: ClockReading) -> float:
        if reading.steady_s < config.lease_s * STEADY_LEASES:
            return pause_s
        has_more = await abandon_lapsed(term, until_ms=reading.server_ms - takeover_ms)
        return 0.0 if has_more else pause_s

    return abandon


def passed_deadlines(term: Term, clock: RunClock, config: BatchingConfig) -> Job:
    """Return the job that writes the events of groups and rewards whose deadline has passed."""
    deadlines_s = [s for s in (config.group_deadline_s, config.reward_deadline_s) if s > 0]
    pause_s = min([LONGEST_PAUSE_S, *(s / CHECKS_PER_DEADLINE for s in deadlines_s)])

    async def fire(reading: ClockReading) -> float:
        next_ms = await fire_deadlines(term, run_ms=clock.at(reading.own_s))
        return pause_s if next_ms < 0 else min(pause_s, next_ms / 1000)

    return fire


def silent_observers(term: Term, clock: RunClock) -> Job:
    """Return the job that removes observers that were silent for longer than their expiry."""

    async def remove(reading: ClockReading) -> float:
        next_ms = await forget_observers(term, run_ms=clock.at(reading.own_s))
        return LONGEST_PAUSE_S if next_ms < 0 else min(LONGEST_PAUSE_S, next_ms / 1000)

    return remove


async def _read_clock(client: redis.asyncio.Redis) -> int:
    with translating():
        time: Any = await client.execute_command("TIME")
    seconds, microseconds = time
    return int(seconds) * 1000 + int(microseconds) // 1000
