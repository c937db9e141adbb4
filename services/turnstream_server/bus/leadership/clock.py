"""The time of a run: measured by its leader's monotonic clock, and kept in the store.

Deadlines and the expiry of observers use it. The store's clock may jump and leaders change; the
time of a run never decreases, and never grows by more than the true time.
"""

from __future__ import annotations

from typing import Final

from turnstream.store.client import keys
from turnstream.store.client.scripts import Script, run_command_async
from turnstream_server.bus.leadership.leadership import Term

LONGEST_MOST_S: Final = 15.0
"""Longest delay of a deadline that starts while the store's clock jumps: see run_clock.lua."""

_KEEP = Script("tick_clock", "turnstream_server.bus.leadership")


class RunClock:
    """Counts the time of one run during one leadership term.

    Args:
        term: the leader's term.
        most_s: most time that counts between two ticks. A leader that stood still does not know the
            deadlines that were set in between.
    """

    def __init__(self, term: Term, *, most_s: float) -> None:
        self._term = term
        self._most_s = most_s
        self._ms: float | None = None
        self._ticked_s = 0.0

    async def tick(self, *, server_ms: int, own_s: float) -> None:
        """Write the time of the run to the store, and continue from there.

        Args:
            server_ms: time of the store's clock.
            own_s: local time when the store's answer arrived.
        """
        names = keys.run_keys(self._term.run)
        ms = None if self._ms is None else self._ms + self._since_ms(own_s)
        command = _KEEP(
            (names.leader, names.clock),
            self._term.epoch,
            "" if ms is None else int(ms),
            server_ms,
            round(self._most_s * 1_000),
        )
        kept_ms: int = await run_command_async(self._term.client, command)
        self._ms = max(ms or 0, kept_ms)
        self._ticked_s = own_s

    def at(self, own_s: float) -> int:
        """The run's time at this time of our own clock, ms; there was a tick before.

        A deadline has passed only when all of its time has, so this is rounded down.
        """
        assert self._ms is not None, "a clock tells the time after its first tick"
        return int(self._ms + self._since_ms(own_s))

    def _since_ms(self, own_s: float) -> float:
        return min(own_s - self._ticked_s, self._most_s) * 1_000
