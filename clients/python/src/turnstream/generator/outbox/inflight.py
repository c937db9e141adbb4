"""Counts of a publisher, and its unacknowledged bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from turnstream.generator.outbox.trajectory_queue import TrajectoryQueue
from turnstream.types import TurnShape


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherStatistics:
    """Counts since the publisher was made.

    Attributes:
        num_trajectories: trajectories sealed and acknowledged.
        num_abandoned: trajectories abandoned.
        num_turns: turns acknowledged.
        wire_bytes: bytes of the acknowledged turn records.
        resend_bytes: their size if each turn carried its full context.
        turn_tokens: prompt + response, summed over the turns.
        merged_tokens: tokens of the merged rows.
        num_duplicates: records that the store already had, after a lost answer or a restart.
        num_retries: calls repeated because the store was away or full.
        num_waits: refused requests for admission.
        wait_s: seconds of waiting for admission.
        num_restarts: restarts of the store after which kept writes were sent again.
        num_resent: turns acknowledged again after a restart.
        num_lost: ended trajectories and posted rewards that the store lost for good.
        num_forgotten: turns dropped from the resend buffer before `keep_s`, for lack of space.
        kept_bytes: acknowledged bytes in the resend buffer.
        max_kept_bytes: limit of `kept_bytes`.
        inflight_bytes: accepted and not yet acknowledged.
        max_inflight_bytes: limit of `inflight_bytes`.
    """

    num_trajectories: int = 0
    num_abandoned: int = 0
    num_turns: int = 0
    wire_bytes: int = 0
    resend_bytes: int = 0
    turn_tokens: int = 0
    merged_tokens: int = 0
    num_duplicates: int = 0
    num_retries: int = 0
    num_waits: int = 0
    wait_s: float = 0.0
    num_restarts: int = 0
    num_resent: int = 0
    num_lost: int = 0
    num_forgotten: int = 0
    kept_bytes: int = 0
    max_kept_bytes: int = 0
    inflight_bytes: int = 0
    max_inflight_bytes: int = 0


class InflightCounts:
    """The numbers of one outbox.

    Args:
        max_inflight_bytes: limit of the unacknowledged bytes, see `has_capacity_...`.

    Attributes:
        inflight_bytes: unacknowledged bytes of open trajectories.
        unadmitted_bytes: unacknowledged bytes of trajectories that are not admitted.
    """

    def __init__(self, max_inflight_bytes: int) -> None:
        self.max_inflight_bytes = max_inflight_bytes
        self.inflight_bytes = 0
        self.unadmitted_bytes = 0
        self._wait_s = 0.0
        self._counts: Counter[str] = Counter()

    def has_capacity_for_turn(self, num_bytes: int) -> bool:
        """Return whether an open trajectory may add so much; always, while nothing is in flight.

        Groups that wait for admission do not count: it may depend on this trajectory.
        """
        total_bytes = self.inflight_bytes + num_bytes
        return self.inflight_bytes == 0 or total_bytes <= self.max_inflight_bytes

    def has_capacity_for_group(self, num_bytes: int) -> bool:
        """Return whether a whole group may be added; always, while nothing is in flight."""
        total_bytes = self.inflight_bytes + self.unadmitted_bytes
        return total_bytes == 0 or total_bytes + num_bytes <= self.max_inflight_bytes

    def add(self, name: str, number: int = 1) -> None:
        """Count something by its name in PublisherStatistics."""
        self._counts[name] += number

    def add_wait(self, wait_s: float) -> None:
        """Add the time that a group waited for admission."""
        self._wait_s += wait_s

    def accepted(self, queue: TrajectoryQueue, num_bytes: int) -> None:
        """Add accepted bytes; a negative number removes them."""
        if queue.epoch:
            self.inflight_bytes += num_bytes
        else:
            self.unadmitted_bytes += num_bytes

    def acknowledged(self, queue: TrajectoryQueue, shape: TurnShape, *, num_bytes: int) -> None:
        """Count a turn that the store acknowledged."""
        self.accepted(queue, -num_bytes)
        counts = self._counts
        counts["num_turns"] += 1
        counts["wire_bytes"] += num_bytes
        counts["resend_bytes"] += num_bytes + 4 * shape.shared_tokens
        counts["turn_tokens"] += shape.num_tokens

    def statistics(self, **resend_counts: int) -> PublisherStatistics:
        """Return the counts so far, with those of the resend buffer."""
        return PublisherStatistics(
            **self._counts,
            **resend_counts,
            wait_s=self._wait_s,
            inflight_bytes=self.inflight_bytes + self.unadmitted_bytes,
            max_inflight_bytes=self.max_inflight_bytes,
        )
