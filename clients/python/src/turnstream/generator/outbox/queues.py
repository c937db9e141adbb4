"""Queues of unsent calls, and their order in a round. No decisions."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator
from typing import Any

from turnstream.generator.outbox.calls import MAX_ROUND_BYTES, num_sendable
from turnstream.generator.outbox.trajectory_queue import Admission, Lane, RunCall

_MAX_SEALS = 256  # a script can unpack some thousand values, not more


class Queues:
    """Everything that is not in flight.

    Attributes:
        abandons: lanes to abandon, all their turns acknowledged.
        seals: lanes whose payload is acknowledged and whose seal is not posted.
        admissions: groups that request admission.
        waiting: groups whose request was refused for lack of capacity, oldest first.
        of_run: calls that no other call waits for.
    """

    def __init__(self) -> None:
        self.abandons: deque[Lane] = deque()
        self.seals: deque[Lane] = deque()
        self.admissions: deque[Admission] = deque()
        self.waiting: deque[Admission] = deque()
        self.of_run: deque[RunCall] = deque()
        self._payload: deque[Lane] = deque()

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not (self.waiting or self.has_calls)

    @property
    def has_calls(self) -> bool:
        """Whether the next round has calls."""
        return any((self.abandons, self.seals, self.admissions, self.of_run, self._payload))

    def add_payload(self, lane: Lane) -> None:
        """Queue a lane that is admitted and has something to send, once."""
        if lane.epoch and not lane.is_queued:
            lane.is_queued = True
            self._payload.append(lane)

    def take_abandons(self) -> list[Lane]:
        """Remove and return the lanes to abandon."""
        return _drained(self.abandons)

    def take_seals(self) -> list[Lane]:
        """Remove and return the lanes whose seals the next round posts."""
        return [self.seals.popleft() for _ in range(min(len(self.seals), _MAX_SEALS))]

    def take_payload(self) -> Iterator[tuple[Lane, int, bool]]:
        """Remove and yield lanes, with the number of turns to send, and whether the seal is sent.

        The caller sends each before it takes the next.
        """
        num_bytes = 0
        while self._payload and num_bytes < MAX_ROUND_BYTES:
            lane = self._payload.popleft()
            lane.is_queued = False
            if lane.error is None:  # else a call would create its payload stream again
                num_turns, num_lane_bytes = num_sendable(lane)
                num_bytes += num_lane_bytes
                yield lane, num_turns, lane.seal is not None and num_turns == len(lane.pending)

    def put_back_payload(self, lane: Lane) -> None:
        """Queue a lane again, before all others; it may be queued for later turns."""
        if not lane.is_queued:
            lane.is_queued = True
            self._payload.appendleft(lane)

    def withdraw(self, lanes: Container[Lane]) -> None:
        """Remove these lanes from all queues."""
        for lane in self._payload:
            lane.is_queued = lane not in lanes
        for queue in (self._payload, self.seals, self.abandons):
            staying = [lane for lane in _drained(queue) if lane not in lanes]
            queue.extend(staying)

    def retry_waiting(self) -> None:
        """Queue the refused requests again, before newer ones."""
        self.admissions.extendleft(reversed(_drained(self.waiting)))

    @property
    def waiting_since_s(self) -> float | None:
        """Return when the oldest waiting group was first refused; None if no group waits."""
        return self.waiting[0].since_s if self.waiting else None

    def withdraw_admission(self, admission: Admission) -> None:
        """Remove the request of this group."""
        for queue in (self.admissions, self.waiting):
            if admission in queue:
                queue.remove(admission)

    def take_abandoned(self) -> list[Admission]:
        """Remove and return the groups whose members are all abandoned before admission."""
        abandoned = [
            admission
            for admission in (*self.admissions, *self.waiting)
            if all(lane.abandon_reason is not None for lane in admission.lanes)
        ]
        for admission in abandoned:
            self.withdraw_admission(admission)
        return abandoned

    def clear(self) -> None:
        """Remove all calls."""
        for lane in self._payload:
            lane.is_queued = False
        for queue in (self.abandons, self.seals, self.admissions, self.waiting, self.of_run):
            queue.clear()
        self._payload.clear()


def _drained(queue: deque[Any]) -> list[Any]:
    drained = list(queue)
    queue.clear()
    return drained
