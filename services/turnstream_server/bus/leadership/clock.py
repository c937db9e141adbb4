"""The time of a run: counted by its leader's own clock, which nobody sets, and kept in the store.

Deadlines and the expiry of observers are by it. The store's clock may jump, a store may stand
still, and leaders change; a run's time only ever goes on, by no more than has truly passed.
"""

from __future__ import annotations

from typing import Final

from turnstream.store.client import keys
from turnstream.store.client.scripts import Script, run_command_async
from turnstream_server.bus.leadership.leadership import Term

LONGEST_MOST_S: Final = 15.0
"""What begins while the store's clock jumps ends late by so much at most: see run_clock.lua."""

_KEEP = Script("keep_clock", "turnstream_server.bus.leadership")


class RunClock:
    """Counts the time of one run, for one term of leading it.

    Args:
        term: the leader's term.
        most_s: of a longer time between two ticks no more than this counts. A leader that stood
            still does not know what its store has promised meanwhile.
    """

    def __init__(self, term: Term, *, most_s: float) -> None:
        self._term = term
        self._most_s = most_s
        self._ms: float | None = None
        self._ticked_s = 0.0

    async def tick(self, *, server_ms: int, own_s: float) -> None:
        """Say in the store which time of the run it is, and go on from there.

        Args:
            server_ms: what the store's clock said.
            own_s: ours, when the store's answer was in.

        Raises:
            FencedError: another planner leads the run.
            StoreUnavailableError: the store cannot be reached.
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
