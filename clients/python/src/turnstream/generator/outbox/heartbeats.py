"""The leases of open trajectories, and the bytes reserved for them. No I/O, no clock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from turnstream.errors import RunNotFoundError, TurnstreamError
from turnstream.generator.outbox.writes import Call, TargetRun, TrajectoryQueue
from turnstream.generator.requests import Lease, RenewLeases, Reservation, Reserve
from turnstream.store.client.replies import Refusal, parse_refusal
from turnstream.store.run.groups import MAX_HEARTBEATS, with_block

BEATS_PER_LEASE = 3
"""Two of them may be lost before a lease ends."""

_FIRST_INTERVAL_S = 0.1
"""Until an answer has said how long a lease is: a third of the shortest that a run may have. Also
where nothing was open: leases may have become shorter since. A publisher that is done before it
needs no heartbeat."""

_FIRST_LEASE_S = 60.0
"""Until then, a silence is long where it is longer than a lease usually is."""

_MAX_TRAJECTORIES = (
    256  # trajectories of one call, which blocks the store for a quarter of a millisecond
)


_logger = logging.getLogger(__name__)


class Heartbeats:
    """The leases of one publisher; `fail` ends trajectories with an error."""

    def __init__(
        self,
        target: TargetRun,
        writer: str,
        fail: Callable[[Sequence[TrajectoryQueue], TurnstreamError], None],
    ) -> None:
        self._target = target
        self._writer = writer
        self._fail = fail
        self._open: dict[TrajectoryQueue, None] = {}
        self._interval_s = _FIRST_INTERVAL_S
        self._due_s = 0.0
        self._known_s = 0.0  # the leases were ours at this time
        self._lease_s = _FIRST_LEASE_S

    @property
    def num_open(self) -> int:
        """Trajectories that hold a lease."""
        return len(self._open)

    def opened(self, queue: TrajectoryQueue, *, now_s: float) -> None:
        """Renew the lease of a trajectory from now on."""
        if not self._open:
            self._due_s = now_s + _FIRST_INTERVAL_S
            self._known_s = now_s
        self._open[queue] = None

    def ended(self, queue: TrajectoryQueue) -> None:
        """Stop renewing the lease of a trajectory."""
        self._open.pop(queue, None)

    def take(self, now_s: float) -> list[Call]:
        """Return the calls to send now: none, or the leases of all open trajectories."""
        if not self._open or now_s < self._due_s:
            return []
        self._due_s = now_s + self._interval_s
        return [self._call(queues, now_s) for queues in _in_parts(self._open, MAX_HEARTBEATS)]

    def _call(self, queues: Sequence[TrajectoryQueue], sent_s: float) -> Call:
        leases = [Lease(queue.trajectory_id, queue.epoch) for queue in queues]
        return Call(
            RenewLeases(self._target.run, self._writer, leases),
            partial(self._renewed, queues, sent_s),
            partial(self._not_renewed, queues),
            self.failed,
            is_write=False,
        )

    def _renewed(
        self, queues: Sequence[TrajectoryQueue], sent_s: float, answers: Sequence[Any], _: float
    ) -> None:
        """Handle renewed and lost leases.

        A lost lease of an ending trajectory is no failure, because its end may be stored already.
        It is one if the trajectory was abandoned before its first write.
        """
        lease_ms, *states = answers
        self.answered(lease_s=lease_ms / 1000, sent_s=sent_s)
        for queue, state in zip(queues, states, strict=True):
            if state == b"OK":
                continue
            refused = parse_refusal(state.decode())
            if not queue.is_ending or _is_gone_unwritten(queue, refused):
                self._fail([queue], refused.error)

    def _not_renewed(self, queues: Sequence[TrajectoryQueue], refused: Refusal, _: float) -> None:
        _logger.warning("run %s: leases cannot be renewed: %s", self._target.run, refused.error)
        if isinstance(refused.error, RunNotFoundError):
            self._fail([queue for queue in queues if not queue.is_ending], refused.error)

    def failed(self) -> None:
        """Make the next heartbeats due at once, since these were not answered."""
        self._due_s = 0.0

    def renewed_meanwhile(self, answers: Sequence[Any], *, sent_s: float) -> None:
        """Handle the answers to heartbeats that were sent beside a round.

        A lost lease fails no trajectory here, since its turns are on their way: the next heartbeats
        go alone, before other writes.
        """
        is_lost = any(state != b"OK" for _, *states in answers for state in states)
        self.answered(lease_s=answers[0][0] / 1000, sent_s=sent_s)
        if is_lost:
            self._due_s = self._known_s = float("-inf")

    def has_slept(self, now_s: float) -> bool:
        """Return whether no renewal was acknowledged for a lease, so that leases may be lost."""
        return bool(self._open) and now_s - self._known_s > self._lease_s

    def answered(self, *, lease_s: float, sent_s: float) -> None:
        """Record the length of a lease, which was valid when the heartbeats were sent."""
        self._known_s, self._lease_s = max(self._known_s, sent_s), lease_s
        interval_s = lease_s / BEATS_PER_LEASE
        self._due_s += interval_s - self._interval_s
        self._interval_s = interval_s

    def pause_s(self, now_s: float) -> float | None:
        """Seconds until something is due; None while nothing is open."""
        return max(0.0, self._due_s - now_s) if self._open else None


class Reservations:
    """Bytes that one publisher must reserve; no write waits for a reservation."""

    def __init__(self, target: TargetRun, writer: str) -> None:
        self._target = target
        self._writer = writer
        self._grown: dict[TrajectoryQueue, None] = {}

    def grew(self, queue: TrajectoryQueue) -> None:
        """Reserve more for an open trajectory, if its records outgrew the reservation.

        A trajectory whose seal is sent needs no more: the event of the seal has the bytes.
        """
        if queue.epoch and queue.num_bytes > queue.reserved_bytes:
            self._grown[queue] = None

    def ended(self, queue: TrajectoryQueue) -> None:
        """Reserve no more bytes for a trajectory."""
        self._grown.pop(queue, None)

    def take(self) -> list[Call]:
        """Return the calls to send now."""
        growing = (queue for queue in self._grown if not queue.seal_record)
        grown = _in_parts(growing, _MAX_TRAJECTORIES)
        self._grown.clear()
        return [self._call(queues) for queues in grown]

    def _call(self, queues: Sequence[TrajectoryQueue]) -> Call:
        wanted = [
            Reservation(
                queue.trajectory_id,
                queue.epoch,
                queue.num_bytes if queue.is_ending else with_block(queue.num_bytes),
            )
            for queue in queues
        ]
        return Call(
            Reserve(self._target.run, self._writer, wanted),
            partial(self._reserved, queues),
            self._refused,
            partial(self._failed, queues),
            is_write=False,
        )

    def _reserved(
        self, queues: Sequence[TrajectoryQueue], answers: Sequence[Any], _: float
    ) -> None:
        for queue, num_bytes in zip(queues, answers, strict=True):
            queue.reserved_bytes = max(queue.reserved_bytes, num_bytes)

    def _refused(self, refused: Refusal, _: float) -> None:
        _logger.warning("run %s: no bytes can be reserved: %s", self._target.run, refused.error)

    def _failed(self, queues: Sequence[TrajectoryQueue]) -> None:
        """Reserve again for these trajectories, since the call was not answered."""
        for queue in queues:
            if queue.error is None:
                self.grew(queue)


def _is_gone_unwritten(queue: TrajectoryQueue, refused: Refusal) -> bool:
    """Whether a trajectory would write its first turns for nothing: its seal cannot be stored."""
    is_gone = refused.fact in ("abandoned", "unknown")
    return is_gone and bool(queue.pending) and not queue.is_placed


def _in_parts(queues: Iterable[TrajectoryQueue], size: int) -> list[list[TrajectoryQueue]]:
    left = iter(queues)
    return list(iter(lambda: list(islice(left, size)), []))
