"""The time of a run: measured by its leader's monotonic clock, and kept in the store.

Deadlines and the expiry of observers use it. The store's clock may jump and leaders change; the
time of a run never decreases, and never grows by more than the true time.
"""

from __future__ import annotations

from typing import Final

from turnstream_server.bus.leadership.leadership import LeaderScript, Term

LONGEST_MOST_S: Final = 15.0
"""Longest delay of a deadline that starts while the store's clock jumps: see run_clock.lua."""

_TICK = LeaderScript("tick_clock", "leadership", "clock")


class RunClock:
    """Counts the time of one run during one leadership term.

    Between two ticks at most `most_s` counts. A leader that stood still does not know the deadlines
    that were set in between.
    """

    def __init__(self, term: Term, *, most_s: float) -> None:
        self._term = term
        self._most_s = most_s
        self._ms: float | None = None
        self._ticked_s = 0.0

    async def tick(self, *, server_ms: int, own_s: float) -> None:
        """Write the time of the run to the store; `server_ms` and `own_s` are of one moment."""
        ms = None if self._ms is None else self._ms + self._since_ms(own_s)
        own_ms = "" if ms is None else int(ms)
        most_ms = round(self._most_s * 1_000)
        kept_ms: int = await _TICK.run(self._term, own_ms, server_ms, most_ms)
        self._ms = max(ms or 0, kept_ms)
        self._ticked_s = own_s

    def at(self, own_s: float) -> int:
        """Return the run's time at a time of our own clock, in ms, rounded down."""
        assert self._ms is not None, "a clock tells the time after its first tick"
        return int(self._ms + self._since_ms(own_s))

    def _since_ms(self, own_s: float) -> float:
        return min(own_s - self._ticked_s, self._most_s) * 1_000
