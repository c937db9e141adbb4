"""Counts of the trajectories that a replica reads as the planner of a run."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Final

from turnstream.batching.planning.plan_batch import event_order
from turnstream.types import Event, SealedTrajectory, TrajectoryAbandoned, TrajectoryDied

logger = logging.getLogger(__name__)

_OUTCOMES: Final[dict[type[object], str]] = {
    SealedTrajectory: "sealed",
    TrajectoryAbandoned: "abandoned",
    TrajectoryDied: "died",
}


class Ingested:
    """Counts of one run in one process; each event counts once, in any number of terms.

    Attributes:
        outcomes: trajectories by "sealed", "abandoned" and "died".
        num_turns, num_tokens, num_bytes: totals of the sealed ones.
    """

    def __init__(self, run: str) -> None:
        self.outcomes: Counter[str] = Counter()
        self.num_turns = 0
        self.num_tokens = 0
        self.num_bytes = 0
        self._run = run
        self._through: tuple[int, ...] | None = None

    def begin(self, *, epoch: int) -> None:
        """Begin a term with this epoch; earlier leaders have counted what was written before."""
        if self._through is None:
            self._through = (0, 0) if epoch == 1 else (int(time.time() * 1000), 0)

    def count(self, event_id: str, event: Event) -> None:
        """Count an event that ends a trajectory."""
        outcome = _OUTCOMES.get(type(event))
        if outcome is None or self._through is None:
            return
        order = event_order(event_id)
        if order <= self._through:
            return
        self._through = order
        self.outcomes[outcome] += 1
        if isinstance(event, SealedTrajectory):
            self.num_turns += len(event.turns)
            self.num_tokens += sum(turn.num_tokens for turn in event.turns)
            self.num_bytes += event.num_payload_bytes
        if logger.isEnabledFor(logging.DEBUG):
            assert isinstance(event, SealedTrajectory | TrajectoryAbandoned | TrajectoryDied)
            trajectory = event.key.trajectory_id
            logger.debug(outcome, extra={"run": self._run, "trajectory": trajectory})
