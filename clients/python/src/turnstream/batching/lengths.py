"""What the lengths of a trajectory say of it, before any of its tokens is read."""

from __future__ import annotations

from turnstream.batching.config import BatchingConfig
from turnstream.batching.merge import plan_sequences
from turnstream.types import SealedTrajectory


def length_problem(trajectory: SealedTrajectory, config: BatchingConfig) -> str:
    """Why a row of this trajectory exceeds what the run lets a pass cost; empty if none does."""
    if config.over_long == "alone":
        return ""
    budget = config.budget
    for row in plan_sequences(trajectory.turns, merge=config.merge):
        cost = budget.cost([row.num_tokens])
        if cost > budget.limit:
            return (
                f"has a row of {row.num_tokens} tokens, which costs {cost:g} of the "
                f"{budget.limit:g} that a micro-batch may"
            )
    return ""
