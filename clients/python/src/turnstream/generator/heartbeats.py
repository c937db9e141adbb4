"""Which trajectories are open, and when their leases must be renewed. No I/O, no clock."""

from __future__ import annotations

from itertools import islice

from turnstream.generator.calls import HeartbeatCall
from turnstream.generator.lanes import Lane
from turnstream.store.leases import MAX_HEARTBEATS

BEATS_PER_LEASE = 3
"""Two of them may be lost before a lease ends."""

_FIRST_INTERVAL_S = 0.1
"""Until an answer has said how long a lease is: a third of the shortest that a run may have. Also
where nothing was open: leases may have become shorter since. A publisher that is done before it
needs no heartbeat."""

_FIRST_LEASE_S = 60.0
"""Until then, a silence is long where it is longer than a lease usually is."""


class Heartbeats:
    """The leases of one publisher. Its owner sends what is due and hands in the answers."""

    def __init__(self) -> None:
        self._open: dict[Lane, None] = {}
        self._interval_s = _FIRST_INTERVAL_S
        self._due_s = 0.0
        self._sent_s = 0.0
        self._known_s = 0.0  # the leases were ours at this time
        self._lease_s = _FIRST_LEASE_S

    @property
    def num_open(self) -> int:
        """Trajectories that hold a lease."""
        return len(self._open)

    def opened(self, lane: Lane, *, now_s: float) -> None:
        """A trajectory has a lease from now on."""
        if not self._open:
            self._due_s = now_s + _FIRST_INTERVAL_S
            self._known_s = now_s
        self._open[lane] = None

    def ended(self, lane: Lane) -> None:
        """A trajectory needs no lease any more, or has lost it."""
        self._open.pop(lane, None)

    def due(self, now_s: float) -> list[HeartbeatCall]:
        """The calls to send now: none, or the leases of all open trajectories."""
        if not self._open or now_s < self._due_s:
            return []
        lanes = iter(self._open)
        num_calls = -(-len(self._open) // MAX_HEARTBEATS)
        return [HeartbeatCall(list(islice(lanes, MAX_HEARTBEATS))) for _ in range(num_calls)]

    def sent(self, now_s: float) -> None:
        """They are on their way: the next ones follow after the usual interval."""
        self._sent_s = now_s
        self._due_s = now_s + self._interval_s

    def failed(self) -> None:
        """They were not answered: the next ones are due as soon as the store may be asked."""
        self._due_s = 0.0

    def has_slept(self, now_s: float) -> bool:
        """Whether what is open may be another's, or given up: nothing was heard for a lease."""
        return bool(self._open) and now_s - self._known_s > self._lease_s

    def answered(self, *, lease_s: float) -> None:
        """The store has said how long a lease is, some time since it was asked."""
        self._known_s, self._lease_s = self._sent_s, lease_s
        interval_s = lease_s / BEATS_PER_LEASE
        self._due_s += interval_s - self._interval_s
        self._interval_s = interval_s

    def pause_s(self, now_s: float) -> float | None:
        """Seconds until something is due; None while nothing is open."""
        return max(0.0, self._due_s - now_s) if self._open else None
