"""What the lengths and the end of a trajectory say of it, before any of its tokens is read."""

from __future__ import annotations

from turnstream.batching.config import BatchingConfig
from turnstream.batching.filters import is_cut_off
from turnstream.batching.merge import plan_sequences
from turnstream.types import SealedTrajectory


def num_response_tokens(trajectory: SealedTrajectory) -> int:
    """Tokens that the policy sampled, in all turns."""
    return sum([turn.num_response_tokens for turn in trajectory.turns])


def is_masked(trajectory: SealedTrajectory, config: BatchingConfig) -> bool:
    """Whether no token of it is trained, because it was cut off or is too long."""
    if not config.mask_truncated:
        return False
    limit = config.overlong_length
    is_overlong = limit > 0 and num_response_tokens(trajectory) > limit
    return is_overlong or is_cut_off(trajectory.status)


def is_compared(trajectory: SealedTrajectory, config: BatchingConfig) -> bool:
    """Whether its reward is part of its group's baseline."""
    return config.masked_reward == "keep" or not is_masked(trajectory, config)


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
