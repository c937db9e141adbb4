"""Which open trajectories have outgrown the bytes that are reserved for them. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from turnstream.generator.calls import Call, ReserveCall
from turnstream.generator.lanes import Lane
from turnstream.store.budget import with_block

_MAX_LANES = 256  # of one call: the store does nothing else for a quarter of a millisecond


class Reservations:
    """What one publisher must ask room for. Its owner sends what is due and hands in the answers.

    The store refuses none of it, so that nothing waits for an answer.
    """

    def __init__(self) -> None:
        self._grown: dict[Lane, None] = {}

    def grew(self, lane: Lane) -> None:
        """A trajectory has more records than before, or is open from now on."""
        if lane.epoch and lane.num_bytes > lane.reserved_bytes:
            self._grown[lane] = None

    def ended(self, lane: Lane) -> None:
        """A trajectory needs no room any more."""
        self._grown.pop(lane, None)

    def due(self) -> list[ReserveCall]:
        """The calls to send now."""
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
        """For so many bytes there is room now."""
        for lane, num_bytes in zip(lanes, answers, strict=True):
            lane.reserved_bytes = max(lane.reserved_bytes, num_bytes)

    def failed(self, calls: Sequence[Call]) -> None:
        """Calls that were not answered: to be sent again, with what else there is by then."""
        for call in calls:
            if isinstance(call, ReserveCall):
                for lane in call.lanes:
                    if lane.error is None:
                        self.grew(lane)
