"""Counts what a publisher does, and the bytes that are on their way."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from turnstream.errors import WaitReason
from turnstream.generator.encode.encoder import TurnRecord
from turnstream.generator.outbox.outbox_waits import no_room
from turnstream.generator.outbox.trajectory_queue import Lane


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherStatistics:
    """Counts since the publisher was made.

    Attributes:
        num_trajectories: trajectories sealed and acknowledged.
        num_abandoned: trajectories given up.
        num_turns: turns acknowledged.
        wire_bytes: bytes of the acknowledged turn records.
        resend_bytes: what they would be if each turn carried its full context.
        turn_tokens: prompt + response, summed over the turns.
        merged_tokens: tokens of the rows that the turns merge to.
        num_duplicates: records that the store had already, from a call whose answer was lost, or
            from before a restart.
        num_retries: how often a call had to be repeated because the store was away or full.
        num_waits: how often a group had to wait for leave to start.
        wait_s: seconds of those waits.
        num_restarts: how often another start of the store answered than before, which may have lost
            writes, so that they were sent again.
        num_resent: turns that were sent again then, and acknowledged again.
        num_lost: ended trajectories, and posted rewards, that a store forgot for good.
        num_forgotten: turns that were kept for less than `keep_s`, for want of room.
        kept_bytes: acknowledged, and kept to be sent again.
        max_kept_bytes: the bound of that.
        inflight_bytes: accepted and not yet acknowledged.
        max_inflight_bytes: the bound of that.
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


class Tally:
    """The numbers of one outbox.

    Args:
        max_inflight_bytes: bound of what is accepted and not acknowledged, see `has_room_...`.
    """

    def __init__(self, max_inflight_bytes: int) -> None:
        self._max_inflight_bytes = max_inflight_bytes
        self._inflight_bytes = 0
        self._held_bytes = 0  # of trajectories that are not admitted
        self._wait_s = 0.0
        self._counts: Counter[str] = Counter()

    def has_room_for_turn(self, num_bytes: int) -> bool:
        """Whether an open trajectory may add so much; anything fits while nothing is on its way.

        What waits for leave does not count: leave may depend on this very trajectory.
        """
        total_bytes = self._inflight_bytes + num_bytes
        return self._inflight_bytes == 0 or total_bytes <= self._max_inflight_bytes

    def has_room_for_group(self, num_bytes: int) -> bool:
        """Whether a whole group may be added; anything fits while nothing is on its way."""
        held_bytes = self._inflight_bytes + self._held_bytes
        return held_bytes == 0 or held_bytes + num_bytes <= self._max_inflight_bytes

    def why_no_room(self) -> WaitReason:
        """What is on its way, where it leaves no room."""
        return no_room(
            inflight_bytes=self._inflight_bytes,
            held_bytes=self._held_bytes,
            max_inflight_bytes=self._max_inflight_bytes,
        )

    def add(self, name: str, number: int = 1) -> None:
        """Count something by its name in PublisherStatistics."""
        self._counts[name] += number

    def add_wait(self, wait_s: float) -> None:
        """A group has waited so long for leave."""
        self._wait_s += wait_s

    def accepted(self, lane: Lane, num_bytes: int) -> None:
        """So many bytes are on their way; fewer if negative."""
        if lane.epoch:
            self._inflight_bytes += num_bytes
        else:
            self._held_bytes += num_bytes

    def acknowledged(self, lane: Lane, turn: TurnRecord) -> None:
        """The store has a turn."""
        num_bytes = len(turn.record)
        self.accepted(lane, -num_bytes)
        counts = self._counts
        counts["num_turns"] += 1
        counts["wire_bytes"] += num_bytes
        counts["resend_bytes"] += num_bytes + 4 * turn.shape.shared_tokens
        counts["turn_tokens"] += turn.shape.num_tokens

    def statistics(self, **window: int) -> PublisherStatistics:
        """What happened so far, and what is kept beside, by its names there."""
        return PublisherStatistics(
            **self._counts,
            **window,
            wait_s=self._wait_s,
            inflight_bytes=self._inflight_bytes + self._held_bytes,
            max_inflight_bytes=self._max_inflight_bytes,
        )
