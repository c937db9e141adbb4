"""Leases of trajectories, as the true time knows them: what is given up was silent for long."""

from __future__ import annotations

from typing import Any

from simulator.seen import Seen, Violations
from turnstream_server.batcher.timekeeper import STEADY_LEASES

_GIVEN_UP = b"abandoned:the lease of "


class Leases:
    """Notes when the store heard of each lease, and how often its clock has jumped since."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._ends: dict[bytes, float] = {}
        self._heard: dict[bytes, tuple[float, int]] = {}

    def forget(self) -> None:
        """The store went back: what it has was heard nobody knows when."""
        self._ends = dict(self._scores())
        self._heard.clear()

    def check(self) -> Violations:
        """Nobody is given up for a jump of the clock who was heard behind it, or just before.

        Whoever was heard less than half a lease ago has had no time to be heard again. Of two jumps
        in one silence the second may undo the first, and nobody has seen either.
        """
        ends = self._scores()
        if ends == self._ends:
            return
        world, life = self._seen.world, self._seen.life
        now_s, num_jumps = world.now_s, world.counts.get("jump", 0)
        least_s = min([config.lease_s for config in life.ever_in_force]) * STEADY_LEASES
        for name in self._ends.keys() - ends.keys():
            heard_s, num_before = self._heard.pop(name, (float("-inf"), 0))
            is_early = now_s - heard_s < least_s and num_jumps - num_before <= 1
            if is_early and self._seen.hash("ledger").get(name, b"").startswith(_GIVEN_UP):
                yield f"{name.decode()} is given up {now_s - heard_s:.3f} s after it was heard"
        for name, end in ends.items():
            if self._ends.get(name) != end:
                self._heard[name] = now_s, num_jumps
        self._ends = dict(ends)

    def _scores(self) -> dict[bytes, float]:
        leases: Any = self._seen.value("leases")
        return {} if leases is None else leases.scores
