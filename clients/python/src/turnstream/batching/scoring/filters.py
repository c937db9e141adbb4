"""Filters of finished trajectories, by reward, status and length, and the weights of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from turnstream.batching.config import BatchingConfig
from turnstream.batching.config.values import RowWeights
from turnstream.batching.merge.merging import plan_sequences
from turnstream.errors import InvalidConfigError
from turnstream.types import SealedTrajectory, Status

ZERO_VARIANCE_TOLERANCE = 1e-6
"""Rewards closer than this are equal: shaped rewards of the same outcome differ by rounding."""


def has_zero_variance(rewards: Sequence[float]) -> bool:
    """Return whether all rewards are equal (DAPO, Yu et al. 2025, eq. 11); False for one reward.

    >>> has_zero_variance([1.0, 1.0]), has_zero_variance([1.0, 0.0]), has_zero_variance([1.0])
    (True, False, False)
    """
    return len(rewards) > 1 and max(rewards) - min(rewards) <= ZERO_VARIANCE_TOLERANCE


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """Return the penalty of a long response, to be added to the reward (DAPO, eq. 13).

    0 up to `max_tokens - buffer_tokens`, then falling linearly to -1 at `max_tokens`.

    >>> overlong_penalty(18_432, max_tokens=20_480, buffer_tokens=4_096)
    -0.5
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise InvalidConfigError("buffer_tokens", f"{buffer_tokens} is not in 1..{max_tokens}")
    excess = num_tokens - (max_tokens - buffer_tokens)
    return max(min(-excess / buffer_tokens, 0.0), -1.0)


def row_weights(
    kind: RowWeights, *, trajectory_B: NDArray[np.integer], num_trained_B: NDArray[np.integer]
) -> NDArray[np.float32]:
    """Return the weight of every row, float32 (B,).

    With two rows of 3 and 1 trained tokens, and a trajectory of one row::

        per_row          1     1     1      every row alike
        per_trajectory   1/2   1/2   1      every trajectory alike, its rows alike
        rollout_mean     3/4   1/4   1      every trajectory alike, its tokens alike
    """
    is_live_B = num_trained_B > 0
    if kind == "per_row":
        return is_live_B.astype(np.float32)
    _, index_B = np.unique(trajectory_B, return_inverse=True)
    share_B = is_live_B if kind == "per_trajectory" else num_trained_B
    totals = np.bincount(index_B, weights=share_B)
    return (share_B / np.maximum(totals[index_B], 1)).astype(np.float32)


def num_response_tokens(trajectory: SealedTrajectory) -> int:
    """Tokens that the policy sampled, in all turns."""
    return sum([turn.num_response_tokens for turn in trajectory.turns])


def is_masked(trajectory: SealedTrajectory, config: BatchingConfig) -> bool:
    """Return whether no token of it is trained: it was cut off, or is too long."""
    if not config.mask_truncated:
        return False
    limit = config.overlong_length
    is_overlong = limit > 0 and num_response_tokens(trajectory) > limit
    return is_overlong or trajectory.status in (Status.TRUNCATED, Status.ABORTED)


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
