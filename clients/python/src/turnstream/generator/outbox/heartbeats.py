"""The leases of open trajectories, and the bytes reserved for them. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from turnstream.generator.outbox.calls import Call, HeartbeatCall, ReserveCall
from turnstream.generator.outbox.trajectory_queue import Lane
from turnstream.store.run.budget import with_block
from turnstream.store.run.leases import MAX_HEARTBEATS

BEATS_PER_LEASE = 3
"""Two of them may be lost before a lease ends."""

_FIRST_INTERVAL_S = 0.1
"""Until an answer has said how long a lease is: a third of the shortest that a run may have. Also
where nothing was open: leases may have become shorter since. A publisher that is done before it
needs no heartbeat."""

_FIRST_LEASE_S = 60.0
"""Until then, a silence is long where it is longer than a lease usually is."""

_MAX_LANES = 256  # lanes of one call, which blocks the store for a quarter of a millisecond


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
        """Renew the lease of a trajectory from now on."""
        if not self._open:
            self._due_s = now_s + _FIRST_INTERVAL_S
            self._known_s = now_s
        self._open[lane] = None

    def ended(self, lane: Lane) -> None:
        """Stop renewing the lease of a trajectory."""
        self._open.pop(lane, None)

    def due(self, now_s: float) -> list[HeartbeatCall]:
        """Return the calls to send now: none, or the leases of all open trajectories."""
        if not self._open or now_s < self._due_s:
            return []
        lanes = iter(self._open)
        num_calls = -(-len(self._open) // MAX_HEARTBEATS)
        return [HeartbeatCall(list(islice(lanes, MAX_HEARTBEATS))) for _ in range(num_calls)]

    def sent(self, now_s: float) -> None:
        """Record that heartbeats were sent; the next follow after the interval."""
        self._sent_s = now_s
        self._due_s = now_s + self._interval_s

    def failed(self) -> None:
        """Make the next heartbeats due at once, since these were not answered."""
        self._due_s = 0.0

    def has_slept(self, now_s: float) -> bool:
        """Return whether no renewal was acknowledged for a lease, so that leases may be lost."""
        return bool(self._open) and now_s - self._known_s > self._lease_s

    def answered(self, *, lease_s: float) -> None:
        """Record the length of a lease, which was valid when the heartbeats were sent."""
        self._known_s, self._lease_s = self._sent_s, lease_s
        interval_s = lease_s / BEATS_PER_LEASE
        self._due_s += interval_s - self._interval_s
        self._interval_s = interval_s

    def pause_s(self, now_s: float) -> float | None:
        """Seconds until something is due; None while nothing is open."""
        return max(0.0, self._due_s - now_s) if self._open else None


class Reservations:
    """Bytes that one publisher must reserve. Its owner sends due calls and passes the answers back.

    The store refuses no reservation, so no write waits for one.
    """

    def __init__(self) -> None:
        self._grown: dict[Lane, None] = {}

    def grew(self, lane: Lane) -> None:
        """Reserve more for an open trajectory, if its records outgrew the reservation."""
        if lane.epoch and lane.num_bytes > lane.reserved_bytes:
            self._grown[lane] = None

    def ended(self, lane: Lane) -> None:
        """Reserve no more bytes for a trajectory."""
        self._grown.pop(lane, None)

    def due(self) -> list[ReserveCall]:
        """Return the calls to send now."""
        lanes = iter(self._grown)
        calls: list[ReserveCall] = []
        while some := list(islice(lanes, _MAX_LANES)):
            sizes = [
                lane.num_bytes if lane.is_ending else with_block(lane.num_bytes) for lane in some
            ]
            calls.append(ReserveCall(some, sizes))
        self._grown.clear()
        return calls

    def answered(self, lanes: Sequence[Lane], answers: Sequence[Any]) -> None:
        """Record the bytes that the store has reserved."""
        for lane, num_bytes in zip(lanes, answers, strict=True):
            lane.reserved_bytes = max(lane.reserved_bytes, num_bytes)

    def failed(self, calls: Sequence[Call]) -> None:
        """Send unanswered reservations again, with the size of that time."""
        for call in calls:
            if isinstance(call, ReserveCall):
                for lane in call.lanes:
                    if lane.error is None:
                        self.grew(lane)
