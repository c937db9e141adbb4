"""The only source of time events: due scripts run while this replica leads.

Leases use the store's clock, which all replicas share. That clock may jump, and a stopped store
lets leases expire that no writer could renew. So the timekeeper compares it with its own clock, and
passes every script the time for which it has been steady. Deadlines and observers use the run's
time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

import redis.asyncio
from redis.exceptions import RedisError

from turnstream.batching.config import BatchingConfig
from turnstream.store.client.replies import translate
from turnstream_server.bus.leadership.clock import LONGEST_MOST_S, RunClock
from turnstream_server.bus.leadership.leadership import Term
from turnstream_server.bus.planning.deadlines import fire_deadlines
from turnstream_server.bus.planning.leases import abandon_lapsed
from turnstream_server.bus.sessions.observers import forget_observers

logger = logging.getLogger(__name__)

LOOKS_PER_LEASE: Final = 10
"""How often the store's clock is read."""

TOLERANCE_LEASES: Final = 1 / 4
"""Tolerated pause of the store, and jump of its clock, in leases. A writer that renews every third
of its lease survives both together. Longer ones make the clock unsteady."""

STEADY_LEASES: Final = 1 / 2
"""How long the clock must have been steady before a lease counts as ended: in it, every writer that
lives has sent a heartbeat, and the store has heard it."""

LOOKS_PER_DEADLINE: Final = 20
"""A deadline that is set while the timekeeper sleeps fires late by so small a part of it."""

LONGEST_PAUSE_S: Final = 5.0
"""Between two looks at the run's clock, at the observers, and at the deadlines, which generators of
any release may set."""


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


class DueScript(NamedTuple):
    """Something that is to happen at a time of the store's clock.

    Attributes:
        name: for the log.
        run: does what is due; gives the seconds after which to call it again, which must be before
            anything else can be due.
    """

    name: str
    run: Callable[[ClockReading], Awaitable[float]]


class SteadyClock:
    """Judges the store's clock by our own monotonic one. No I/O.

    Args:
        tolerance_s: how long the store may be silent, and how far its clock may be set.
    """

    def __init__(self, *, tolerance_s: float) -> None:
        self._tolerance_s = tolerance_s
        self._since_s = 0.0
        self._read_s = float("-inf")
        self._ahead_s = 0.0  # local time since which it is steady

    def read(self, *, server_ms: int, now_s: float) -> ClockReading:
        """The store has just said what time it is."""
        ahead_s = server_ms / 1000 - now_s
        was_silent = now_s - self._read_s > self._tolerance_s
        if was_silent or abs(ahead_s - self._ahead_s) > self._tolerance_s:
            self._since_s, self._ahead_s = now_s, ahead_s
        self._read_s = now_s
        return ClockReading(server_ms, now_s - self._since_s, now_s)


class Timekeeper:
    """Runs the due scripts of one run, for one term of leading it.

    Args:
        client: client of the store.
        scripts: each must be fenced by the epoch of the term.
        tolerance_s: see SteadyClock.
        longest_pause_s: longest time between two reads of the store's clock.
        sleep: pauses for so many seconds, or less.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        scripts: Sequence[DueScript],
        *,
        tolerance_s: float,
        longest_pause_s: float,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._client = client
        self._sleep = sleep
        self._scripts = scripts
        self._clock = SteadyClock(tolerance_s=tolerance_s)
        self._longest_pause_s = longest_pause_s

    async def keep(self, *, until: Callable[[], bool] = lambda: False) -> None:
        """Run what is due, until it is to end."""
        loop = asyncio.get_running_loop()
        due_s = dict.fromkeys(self._scripts, 0.0)
        while not until():
            reading = self._clock.read(server_ms=await self._read_clock(), now_s=loop.time())
            for script in self._scripts:
                if due_s[script] <= loop.time():
                    due_s[script] = await script.run(reading) + loop.time()
            pause_s = min(due_s.values(), default=float("inf")) - loop.time()
            await self._sleep(max(0.0, min(pause_s, self._longest_pause_s)))

    async def _read_clock(self) -> int:
        try:
            time: Any = await self._client.execute_command("TIME")
        except (RedisError, OSError) as error:
            raise translate(error) from error
        seconds, microseconds = time
        return int(seconds) * 1000 + int(microseconds) // 1000


def timekeeper(
    term: Term,
    *,
    config: BatchingConfig,
    others: Sequence[DueScript] = (),
    sleep: Sleep = asyncio.sleep,
) -> Timekeeper:
    """The timekeeper of a run, with every script that a run has, and others."""
    tolerance_s = config.lease_s * TOLERANCE_LEASES
    most_s = min(LONGEST_MOST_S, tolerance_s)
    clock = RunClock(term, most_s=most_s)
    return Timekeeper(
        term.client,
        [
            going_clock(clock, config=config),
            lapsed_leases(term, config=config),
            passed_deadlines(term, clock, config=config),
            silent_observers(term, clock),
            *others,
        ],
        tolerance_s=tolerance_s,
        longest_pause_s=config.lease_s / LOOKS_PER_LEASE,
        sleep=sleep,
    )


def going_clock(clock: RunClock, *, config: BatchingConfig) -> DueScript:
    """Counts the run's time; before every other script that goes by it."""
    pause_s = min(LONGEST_PAUSE_S, config.lease_s / LOOKS_PER_LEASE)

    async def tick(reading: ClockReading) -> float:
        await clock.tick(server_ms=reading.server_ms, own_s=reading.own_s)
        return pause_s

    return DueScript("the run's clock", tick)


def lapsed_leases(term: Term, *, config: BatchingConfig) -> DueScript:
    """Return a script that abandons trajectories not adopted in time (`takeover_s`)."""
    takeover_ms = round(config.takeover_s * 1000)
    pause_s = config.lease_s / LOOKS_PER_LEASE

    async def give_up(reading: ClockReading) -> float:
        if reading.steady_s < config.lease_s * STEADY_LEASES:
            return pause_s
        until_ms = reading.server_ms - takeover_ms
        has_more = await abandon_lapsed(term, until_ms=until_ms)
        return 0.0 if has_more else pause_s

    return DueScript("lapsed leases", give_up)


def passed_deadlines(term: Term, clock: RunClock, *, config: BatchingConfig) -> DueScript:
    """Writes the events of groups and rewards whose deadline has passed."""
    deadlines_s = [s for s in (config.group_deadline_s, config.reward_deadline_s) if s > 0]
    pause_s = min([LONGEST_PAUSE_S, *(s / LOOKS_PER_DEADLINE for s in deadlines_s)])

    async def fire(reading: ClockReading) -> float:
        run_ms = clock.at(reading.own_s)
        next_ms = await fire_deadlines(term, run_ms=run_ms)
        return pause_s if next_ms < 0 else min(pause_s, next_ms / 1000)

    return DueScript("passed deadlines", fire)


def silent_observers(term: Term, clock: RunClock) -> DueScript:
    """Forgets observers that were silent for longer than their expiry."""

    async def forget(reading: ClockReading) -> float:
        run_ms = clock.at(reading.own_s)
        next_ms = await forget_observers(term, run_ms=run_ms)
        return LONGEST_PAUSE_S if next_ms < 0 else min(LONGEST_PAUSE_S, next_ms / 1000)

    return DueScript("silent observers", forget)
